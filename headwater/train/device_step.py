"""A training step that leaves the host out: gradients, clipping, the check for bad steps and the update, on the GPU.

The host hands over tokens and a learning rate, and learns loss and gradient norm one step late, while the GPU is at the
next one. A bad step (not finite, or a spike) is found and left out on the GPU itself, so that it never reaches the
weights, however late the host learns of it. Where it can be, a micro-batch and the update are each captured as a CUDA
graph after a few steps: a replay costs the host a tenth of a millisecond, however deep the model is. Captured or not,
the same kernels run in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater._torch import norms_of, skip_where
from headwater.models.moe import routers
from headwater.ops.cross_entropy import linear_cross_entropy, token_losses
from headwater.ops.cuda_graph import NotCaptured, record
from headwater.train.balance import Load, balance_on_device
from headwater.train.losses import half_precision
from headwater.train.monitor.bad_steps import Reason, Skips
from headwater.train.optim import learning_rate, set_learning_rate
from headwater.train.run import Run

WARMUP = 3  # steps before a capture: kernels are compiled, and the optimizer has its state
KINDS = ("", "nonfinite", "spike")


@dataclass(frozen=True)
class Outcome:
    """The numbers of a step that the host has learnt.

    `reason` says why it was left out, if it was; `depth` is the gradient norm of each sublayer, `load` that of the
    experts, where there are some.
    """

    number: int
    loss: float
    grad_norm: float
    rate: float
    depth: list[float] | None = None
    reason: Reason | None = None
    load: Load | None = None


class Sent(NamedTuple):
    """A step whose results are on their way to the host."""

    number: int
    rate: float
    results: Tensor
    norms: Tensor
    arrival: torch.cuda.Event | None


class DeviceStep:
    """Steps of a run that is alone on its GPU. `batch(number, micro)` gives a micro-batch, (B, T + 1), on the host."""

    def __init__(
        self,
        run: Run,
        batch: Callable[[int, int], Tensor],
        *,
        graph: bool,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.batch, self.graph, self.say = run, batch, graph, say
        self.micros = run.config.train.accumulate
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]
        self.sublayers = sublayer_of_each(run.whole, self.parameters)
        self.routers = list(routers(run.whole).values())
        self.judge = Judge(run.skips, run.config.train, run.device)
        # A captured step reads and writes the same memory each time. The host fills one half of `staging` while the
        # GPU still copies from the other. On a CPU, where tests run, nothing is pinned and nothing is waited for.
        device, shape = run.device, batch(run.step + 1, 0).shape
        self.pinned = device.type == "cuda"
        self.staging = torch.empty(2, self.micros, *shape, dtype=torch.long, pin_memory=self.pinned)
        self.tokens = torch.empty(shape, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.norms = torch.zeros(len(self.parameters), device=device)
        # Loss, gradient norm, kind, threshold; then the two numbers of the experts' loads, where there are some.
        self.results = torch.zeros(6 if self.routers else 4, dtype=torch.float64, device=device)
        self.waiting: list[Sent] = []
        # What a step runs: these methods first, later their recordings.
        self.micro: list[Callable[[], None]] = [self._first_micro, self._next_micro]
        self.update: Callable[[], None] = self._update
        self.replay_losses: Callable[[], None] | None = None
        self.steps_taken = 0
        self.pool: Any = None  # the memory that all captures share: they never run at the same time
        # What the judge finds bad, no optimizer applies.
        for optimizer in run.optimizers.values():
            skip_where(optimizer, self.judge.bad)

    def take(self, number: int) -> list[Outcome]:
        """Hand step `number` to the GPU; returns the outcomes that are known by now, the last one before it."""
        if self.graph and self.steps_taken == WARMUP:
            self._capture()
        run, slot = self.run, self.steps_taken % 2
        for micro in range(self.micros):
            staged = self.staging[slot, micro].copy_(self.batch(number, micro))
            self.tokens.copy_(staged, non_blocking=True)
            self.micro[micro > 0]()
        # The optimizers read their rate from the GPU, where it is written now.
        rate = learning_rate(number - 1, run.config.train.steps, run.config.optim)
        set_learning_rate(run.optimizers, rate)
        run.saver.before_update()
        self.update()
        self._send_results(number, rate)
        self.steps_taken += 1
        return self._arrived(1)

    def wait(self) -> list[Outcome]:
        """Wait for the outcomes of all steps so far."""
        return self._arrived(0)

    def _first_micro(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.loss.copy_(self._backward())

    def _next_micro(self) -> None:
        self.loss.add_(self._backward())

    def _backward(self) -> Tensor:
        """Gradients of a micro-batch's share of the mean loss, added to those there are."""
        with half_precision(self.run.device, cached=False):
            hidden = self.run.hidden(self.tokens[:, :-1])
            weight, targets = self.run.whole.head.weight, self.tokens[:, 1:]
            loss = linear_cross_entropy(hidden, weight, targets) / self.micros
        loss.backward()
        return loss.detach()

    def _update(self) -> None:
        """Judge, clip and step. Nothing here waits for the GPU, and nothing depends on what the host knows."""
        # One list operation gives the norms of all gradients.
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.norms.copy_(torch.stack(norms_of(gradients)))
        norm = torch.linalg.vector_norm(self.norms)
        self.judge(self.loss, norm)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.run.config.optim.clip, norm)
        for optimizer in self.run.optimizers.values():
            optimizer.step()
        load = balance_on_device(self.routers, self.run.whole.config.router_rate, self.judge.bad)
        values = (self.loss.double(), norm.double(), self.judge.kind, self.judge.threshold)
        self.results.copy_(torch.cat((torch.stack(values), load)))

    def losses(self, windows: Tensor) -> Tensor:
        """Nats of each token of validation windows (B, T + 1), as (B, T) on the GPU.

        Captured like a step, it borrows the step's memory. It runs what is compiled for a step, and drops the graph of
        gradients.
        """
        if windows.shape != self.tokens.shape:  # fewer windows than a micro-batch has
            return self._losses(windows.to(self.run.device))
        self.tokens.copy_(windows)
        if self.replay_losses is None:
            # Steps that are not captured leave no memory to borrow.
            replays = self._record([self._validate], "evaluations") if self.pool is not None else []
            if not replays:
                return self._losses(self.tokens)
            self.replay_losses = replays[0]
        self.replay_losses()
        return self.validation.clone()

    def _validate(self) -> None:
        self.validation = self._losses(self.tokens)

    def _losses(self, windows: Tensor) -> Tensor:
        with torch.enable_grad(), half_precision(self.run.device, cached=False):
            hidden = self.run.hidden(windows[:, :-1])
            return token_losses(hidden, self.run.whole.head.weight, windows[:, 1:])

    def _capture(self) -> None:
        """Record a micro-batch and the update. A step that cannot be captured goes on without."""
        functions = [self._first_micro, self._update]
        if self.micros > 1:
            functions.insert(1, self._next_micro)
        replays = self._record(functions, "steps")
        self.graph = bool(replays)
        if replays:
            self.micro, self.update = replays[:2], replays[-1]

    def _record(self, functions: list[Callable[[], None]], what: str) -> list[Callable[[], None]]:
        """Replays of these functions, which are recorded and not run; none, and the run says why, if that fails."""
        replays: list[Callable[[], None]] = []
        try:
            for function in functions:
                graph = record(function, self.pool)
                self.pool = graph.pool()
                replays.append(graph.replay)
        except NotCaptured as reason:
            self.pool = None
            why = f"{what} are not captured as a CUDA graph: {reason}"
            self.say(f"{why}. The run goes on without, more slowly")
            return []
        return replays

    def _send_results(self, number: int, rate: float) -> None:
        """Queue copies to the host behind the step, and a mark to wait for."""
        results = self._copy_to_host(self.results)
        norms = self._copy_to_host(self.norms)
        arrival = torch.cuda.Event() if self.pinned else None
        if arrival is not None:
            arrival.record()
        self.waiting.append(Sent(number, rate, results, norms, arrival))

    def _copy_to_host(self, values: Tensor) -> Tensor:
        copy = torch.empty_like(values, device="cpu", pin_memory=self.pinned)
        return copy.copy_(values, non_blocking=True)

    def _arrived(self, behind: int) -> list[Outcome]:
        """Wait for the outcomes of all steps but the last few."""
        outcomes = []
        while len(self.waiting) > behind:
            sent = self.waiting.pop(0)
            if sent.arrival is not None:
                sent.arrival.synchronize()
            loss, norm, kind, threshold, *loads = sent.results.tolist()
            outcome = Outcome(
                number=sent.number,
                loss=loss,
                grad_norm=norm,
                rate=sent.rate,
                depth=self._by_sublayer(sent.norms),
                reason=self.judge.record(loss, KINDS[int(kind)], threshold),
                load=Load(*loads) if loads else None,
            )
            outcomes.append(outcome)
        return outcomes

    def _by_sublayer(self, norms: Tensor) -> list[float]:
        # Norms of parameters become norms of sublayers: squares add up.
        squares = [0.0] * len(self.run.whole.sublayers)
        for place, norm in zip(self.sublayers, norms.tolist(), strict=True):
            if place is not None:
                squares[place] += norm**2
        return [square**0.5 for square in squares]


class Judge:
    """Decides on the GPU which steps are left out, as `Skips.judge` does on the host, and keeps the host's books."""

    def __init__(self, skips: Skips, settings: Any, device: torch.device) -> None:
        self.skips, self.settings = skips, settings
        self.bad = torch.zeros((), device=device)
        self.kind = torch.zeros((), dtype=torch.float64, device=device)
        self.threshold = torch.full((), torch.inf, dtype=torch.float64, device=device)
        # Losses of the last steps that were taken. NaN stands where there was no step yet.
        window = (settings.spike_window,)
        self.losses = torch.full(window, torch.nan, dtype=torch.float64, device=device)
        if skips.losses:
            # The newest loss stands last; the first places wait for the window to fill.
            self.losses[-len(skips.losses) :] = torch.tensor(skips.losses, dtype=torch.float64)

    def __call__(self, loss: Tensor, norm: Tensor) -> None:
        finite = loss.isfinite() & norm.isfinite()
        loss = loss.double()
        spike = torch.zeros_like(finite)
        if self.settings.skip_spikes:
            # As in Skips: the median, and the median deviation scaled to a standard deviation.
            middle = self._median(self.losses)
            deviation = 1.4826 * self._median((self.losses - middle).abs())
            deviation = torch.maximum(deviation, middle.abs() / 1000)
            limit = middle + self.settings.spike_sigmas * deviation
            # Until the window is full the limit is NaN.
            self.threshold.copy_(torch.where(limit.isnan(), torch.inf, limit))
            spike = loss > self.threshold
        bad = ~finite | spike
        self.bad.copy_(bad)
        kind_if_finite = torch.where(spike, 2.0, 0.0)  # numbers as in KINDS
        self.kind.copy_(torch.where(finite, kind_if_finite, 1.0))
        # A step that is left out does not enter the window.
        shifted = torch.cat((self.losses[1:], loss.view(1)))
        self.losses.copy_(torch.where(bad, self.losses, shifted))

    @staticmethod
    def _median(values: Tensor) -> Tensor:
        """The median as `statistics` has it: of an even number, the mean of the middle two. NaN if there is one."""
        ordered, n = values.sort().values, len(values)
        low, high = ordered[(n - 1) // 2], ordered[n // 2]
        return (low + high) / 2 + 0 * values.sum()

    def record(self, loss: float, kind: str, threshold: float) -> Reason | None:
        """Enter what the GPU decided into the books that checkpoints hold."""
        return self.skips.record(loss, kind, threshold, self.settings)


def sublayer_of_each(model: nn.Module, parameters: list[nn.Parameter]) -> list[int | None]:
    """Find the sublayer that each parameter belongs to, its pre-norm included, or None."""
    names = {id(p): name for name, p in model.named_parameters()}
    places: list[int | None] = []
    for parameter in parameters:
        first, *rest = names[id(parameter)].split(".")
        places.append(int(rest[0]) if first == "sublayers" else None)
    return places
