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
from typing import Any

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
        shape = batch(run.step + 1, 0).shape
        # On a CPU, where tests run, nothing is pinned and nothing is waited for.
        self.pinned = run.device.type == "cuda"
        self.staging = torch.empty(2, self.micros, *shape, dtype=torch.long, pin_memory=self.pinned)
        self.tokens = torch.empty(shape, dtype=torch.long, device=run.device)
        self.loss = torch.zeros((), device=run.device)
        self.routers = list(routers(run.whole).values())
        # Loss, gradient norm, kind, threshold; then the two numbers of the experts' loads, where there are some.
        self.results = torch.zeros(6 if self.routers else 4, dtype=torch.float64, device=run.device)
        self.norms = torch.zeros(len(self.parameters), device=run.device)
        self.sublayers = sublayer_of_each(run.whole, self.parameters)
        self.judge = Judge(run.skips, run.config.train, run.device)
        self.waiting: list[tuple[int, float, Tensor, Tensor, torch.cuda.Event | None]] = []
        self.micro: list[Callable[[], None]] = [self._first_micro, self._next_micro]
        self.update: Callable[[], None] = self._update
        self.taken = 0
        self.pool: Any = None  # the memory that all captures share: they never run at the same time
        self.replay_losses: Callable[[], None] | None = None
        for optimizer in run.optimizers.values():
            skip_where(optimizer, self.judge.bad)

    def take(self, number: int) -> list[Outcome]:
        """Hand step `number` to the GPU; returns the outcomes that are known by now, the last one before it."""
        if self.graph and self.taken == WARMUP:
            self._capture()
        run, slot = self.run, self.taken % 2
        for micro in range(self.micros):
            staged = self.staging[slot, micro].copy_(self.batch(number, micro))
            self.tokens.copy_(staged, non_blocking=True)
            self.micro[micro > 0]()
        rate = learning_rate(number - 1, run.config.train.steps, run.config.optim)
        set_learning_rate(run.optimizers, rate)
        run.saver.before_update()
        self.update()
        self._send_results(number, rate)
        self.taken += 1
        return self._known(1)

    def wait(self) -> list[Outcome]:
        """The outcomes of all steps so far."""
        return self._known(0)

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
            loss = (
                linear_cross_entropy(hidden, self.run.whole.head.weight, self.tokens[:, 1:])
                / self.micros
            )
        loss.backward()
        return loss.detach()

    def _update(self) -> None:
        """Judge, clip and step. Nothing here waits for the GPU, and nothing depends on what the host knows."""
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
        """Nats of each token of validation windows (B, T + 1), (B, T) on the GPU. Captured like a step, it borrows the
        step's memory; it runs what is compiled for a step, whose graph of gradients is dropped."""
        if windows.shape != self.tokens.shape:  # fewer windows than a micro-batch has
            return self._losses(windows.to(self.run.device))
        self.tokens.copy_(windows)
        if self.replay_losses is None:
            if (
                self.pool is None
                or (recorded := self._record([self._validate], "evaluations")) is None
            ):
                return self._losses(self.tokens)
            self.replay_losses = recorded[0]
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
        further = [self._next_micro] if self.micros > 1 else []
        recorded = self._record([self._first_micro, *further, self._update], "steps")
        self.graph = recorded is not None
        if recorded is not None:
            self.micro, self.update = [recorded[0], recorded[1]], recorded[-1]

    def _record(
        self, functions: list[Callable[[], None]], what: str
    ) -> list[Callable[[], None]] | None:
        """Replays of these functions, which are recorded and not run; or None, and the run says why."""
        replays: list[Callable[[], None]] = []
        try:
            for function in functions:
                graph = record(function, self.pool)
                self.pool = graph.pool()
                replays.append(graph.replay)
        except NotCaptured as reason:
            self.pool = None
            self.say(
                f"{what} are not captured as a CUDA graph: {reason}. The run goes on without, more slowly"
            )
            return None
        return replays

    def _send_results(self, number: int, rate: float) -> None:
        """Copies to the host behind the step, and a mark to wait for."""
        results = self._copy_to_host(self.results)
        norms = self._copy_to_host(self.norms)
        event = torch.cuda.Event() if self.pinned else None
        if event is not None:
            event.record()
        self.waiting.append((number, rate, results, norms, event))

    def _copy_to_host(self, values: Tensor) -> Tensor:
        copy = torch.empty_like(values, device="cpu", pin_memory=self.pinned)
        return copy.copy_(values, non_blocking=True)

    def _known(self, behind: int) -> list[Outcome]:
        outcomes = []
        while len(self.waiting) > behind:
            number, rate, results, norms, event = self.waiting.pop(0)
            if event is not None:
                event.synchronize()
            loss, norm, kind, threshold, *load = results.tolist()
            reason = self.judge.record(loss, KINDS[int(kind)], threshold)
            uneven = Load(*load) if load else None
            outcomes.append(
                Outcome(number, loss, norm, rate, self._by_sublayer(norms), reason, uneven)
            )
        return outcomes

    def _by_sublayer(self, norms: Tensor) -> list[float]:
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
        window = settings.spike_window
        self.losses = torch.full(
            (window,), torch.nan, dtype=torch.float64, device=device
        )  # of the last taken steps
        if skips.losses:
            # The newest loss stands last; the first places wait for the window to fill.
            self.losses[-len(skips.losses) :] = torch.tensor(skips.losses, dtype=torch.float64)

    def __call__(self, loss: Tensor, norm: Tensor) -> None:
        finite = loss.isfinite() & norm.isfinite()
        loss = loss.double()
        spike = torch.zeros_like(finite)
        if self.settings.skip_spikes:
            middle = self._median(self.losses)
            deviation = 1.4826 * self._median((self.losses - middle).abs())
            high = middle + self.settings.spike_sigmas * torch.maximum(
                deviation, middle.abs() / 1000
            )
            self.threshold.copy_(
                torch.where(high.isnan(), torch.inf, high)
            )  # until the window is full it holds NaN
            spike = loss > self.threshold
        bad = ~finite | spike
        self.bad.copy_(bad)
        self.kind.copy_(torch.where(finite, torch.where(spike, 2.0, 0.0), 1.0))  # as in KINDS
        shifted = torch.cat((self.losses[1:], loss.view(1)))
        self.losses.copy_(torch.where(bad, self.losses, shifted))

    @staticmethod
    def _median(values: Tensor) -> Tensor:
        """The median as `statistics` has it: of an even number, the mean of the middle two. NaN if there is one."""
        ordered, n = values.sort().values, len(values)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 + 0 * values.sum()

    def record(self, loss: float, kind: str, threshold: float) -> Reason | None:
        """Enter what the GPU decided into the books that checkpoints hold."""
        return self.skips.record(loss, kind, threshold, self.settings)


def sublayer_of_each(model: nn.Module, parameters: list[nn.Parameter]) -> list[int | None]:
    """Find the sublayer that each parameter belongs to, its pre-norm included, or None."""
    names = {id(p): name for name, p in model.named_parameters()}
    split = [names[id(p)].split(".") for p in parameters]
    return [int(words[1]) if words[0] == "sublayers" else None for words in split]
