"""A training run, readable from top to bottom: `train` is the run, the rest are its parts in the order it meets them.

Every update is a function of the configuration, its number and the weights alone. So a resumed run repeats exactly
what an undisturbed run does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from headwater.errors import UserError, command, spell
from headwater.folders import at_home
from headwater.models import Decoder
from headwater.residuals import plugin_of
from headwater.residuals.registry import how_to_test, suspected
from headwater.runs.results import DIVERGED, SUMMARY, TrainResult
from headwater.runs.settings import Config
from headwater.train.balance import balance
from headwater.train.checkpoint.folder import last_good
from headwater.train.checkpoint.saver import NotFinite
from headwater.train.device_step import DeviceStep, Outcome
from headwater.train.distributed.fsdp import clip, defer_reduction, gather, reshard
from headwater.train.distributed.parts import squared_norm
from headwater.train.distributed.ranks import gathered
from headwater.train.files import locked, write_json
from headwater.train.losses import half_precision, nats_per_token
from headwater.train.monitor import loggers
from headwater.train.monitor.bad_steps import Reason, cause_file
from headwater.train.monitor.depth import depth_record, gradient_norms
from headwater.train.monitor.interrupts import Interruption
from headwater.train.monitor.progress import ProgressLine
from headwater.train.monitor.watchdog import Watchdog
from headwater.train.optim import ends_in_warmup, learning_rate, set_learning_rate
from headwater.train.run import Run, begin, choose_device, finish, save

TOGETHER = 1e-3  # seconds; no step is shorter
FAILED = 1000  # above every signal: a save in the background has failed
COMPILED = {
    "none": "nothing compiled",
    "layers": "layers compiled",
    "model": "the model compiled",
}


def train(
    config: Config, out: str | Path, *, resume: bool = False, progress: bool = True
) -> TrainResult:
    """Train one model until `config.train.steps` updates are done; what `headwater train` calls.

    Arguments:
        config: what to train on what, and how: `Config()` is a small model on the text of Python's standard library.
        out: folder of the run: settings, tokenizer, metrics.jsonl, checkpoints and, at the end, summary.json.
        resume: continue from the newest checkpoint in `out`. A run that has finished is returned as it
            is, unless its weights were dropped.
        progress: show loss, tokens per second and time left, on a terminal or in a notebook; messages go to stdout.

    Returns: a `TrainResult`, the fields of summary.json and the folder. `load_run(out)` gives the model.

    Raises: `headwater.errors.Interrupted` after Ctrl-C, SIGTERM or a closed terminal: the step under way is finished
        and saved first, and `resume=True` goes on from there bitwise as if nothing had been. It is an error rather than
        a result so that nothing takes half a run for a whole one. In a thread other than the main one Python passes on
        no signals. `headwater.errors.UserError` for settings that do not fit together, a folder that holds another
        run, a damaged checkpoint, a full disk or a loss that is not finite.

    Seeds torch's global generator; on a GPU, `config.train.deterministic` sets torch's global switch.

        config = Config(model=ModelConfig.named("nano", residual="attnres-block"), train=TrainSettings(steps=100))
        print(train(config, "runs/first").bits_per_byte)
    """
    out = at_home(out)
    settings = config.train
    if resume and not (out / "config.json").exists():
        advice = f"check {spell('out')}, or begin one without {spell('resume')}"
        raise UserError(f"there is no run at {out} to resume: {advice}")
    # A package that is missing is known before anything is tokenised.
    loggers.require_packages(config.log)
    with (
        suspected(config.model.residual),
        gathered(config.parallel, choose_device(config)) as ranks,
        locked(out) if ranks.main else nullcontext(),
    ):
        # Everything that can be refused is refused here, before the first step.
        run = begin(config, out, resume=resume, ranks=ranks)
        # A run that has ended is returned as it is.
        if result := finished_before(run):
            return result
        with Watch(run, progress=progress) as watch:
            tell_beginning(run, watch.say, resume=resume)
            steps = steps_of(run, watch.say)
            for number in range(run.step + 1, settings.steps + 1):
                watch.next_step()
                # On a GPU the outcomes are those of the step before.
                outcomes = steps.take(number)
                run.step = number

                # Ranks act on what they have compared: a signal that comes later waits for the next step.
                stop = ranks.max(watch.request())
                tasks = due_after(number, config)
                if tasks or stop:
                    outcomes += steps.wait()
                for outcome in outcomes:
                    report_step(run, outcome, watch)

                if "eval" in tasks:
                    bits = evaluate(run, steps.losses)
                    watch.say(f"step {number}: validation {bits:.4f} bits per byte")
                if "depth" in tasks:
                    log_depth(run, outcomes[-1].depth)
                if tasks & {"eval", "depth"}:
                    watch.clock.rewind()
                if "save" in tasks or stop:
                    save_step(run, watch, stop=bool(stop))
                if stop and number < settings.steps:
                    raise watch.interrupted(stop)
        return finish(run)


def finished_before(run: Run) -> TrainResult | None:
    """The result of a run that had ended, as it is."""
    if run.step < run.config.train.steps:
        return None
    # The main rank reads for all.
    ended = run.ranks.main and (run.folder / SUMMARY).exists()
    return run.ranks.broadcast_object(TrainResult.read(run.folder) if ended else None)


class Watch:
    """Everything around the steps of a run: signals, the limit on a step's time, progress, logs, saves under way."""

    def __init__(self, run: Run, *, progress: bool) -> None:
        config, ranks = run.config, run.ranks
        console = Console(quiet=not (progress and ranks.main))
        self.run = run
        self.line = ProgressLine("training", run.step, config.train.steps, console)
        # One process has nobody to wait for, so it cannot hang on others.
        self.watchdog = Watchdog(0 if ranks.alone else config.parallel.hang_timeout)
        self.interruption = Interruption()
        self.clock = Clock(run)
        self.say = self.line.say

    def __enter__(self) -> Watch:
        run = self.run
        if run.ranks.main:
            run.log.mirrors = loggers.start(run.config.log, run.folder, run.step, run.identity)
        # If one of these fails to begin, those before it end.
        with ExitStack() as stack:
            stack.enter_context(closing(run.log))
            for part in (self.interruption, self.watchdog, self.line, run.saver):
                stack.enter_context(part)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def next_step(self) -> None:
        self.watchdog.reset()

    def request(self) -> int:
        """The signal that asks for a stop, or FAILED after a failed save, or 0."""
        return FAILED if self.run.saver.failed else self.interruption.signum

    def interrupted(self, signum: int) -> Exception:
        """The error that ends a run which a signal has stopped, and says how to go on."""
        run = self.run
        self.interruption.signum = signum
        plugin = plugins(run.config.model.residual)
        go_on = command("train", out=run.folder, plugin=plugin, resume=True)
        after = f"step {run.step} of {run.config.train.steps}"
        return self.interruption.error(after, f"{go_on} (in Python: resume=True)")


def plugins(residual: str) -> list[str]:
    """The module that the command has to import for a residual; none for headwater's own and for a script's."""
    module = plugin_of(residual)
    return [] if module in (None, "__main__") else [module]


def tell_beginning(run: Run, say: Callable[[str], None], *, resume: bool) -> None:
    """Say what the user may not expect of this run."""
    settings = run.config.train
    if resume and not run.step:
        interval = f"one is written every {settings.save_every} steps"
        say(f"no checkpoint in {run.checkpoints} to go on from ({interval}): the run begins anew")
    if run.planned:
        say(goes_further(run))
    if warning := ends_in_warmup(settings.steps, run.config.optim):
        say(warning)


def goes_further(run: Run) -> str:
    """A schedule stretched over more steps does not go on where it was: said, since it shows in the loss."""
    settings, planned = run.config, run.planned or 0
    steps = settings.train.steps
    text = f"goes to {steps} steps, where {planned} were planned"
    rate = f"{learning_rate(run.step, steps, settings.optim):.3g}"
    before = f"{learning_rate(run.step, planned, settings.optim):.3g}"
    if rate == before:  # a run that had not left its warm-up
        return text
    change = f"the learning rate is now {rate} and would have been {before}"
    return f"{text}: from step {run.step} on {change}"


def steps_of(run: Run, say: Callable[[str], None]) -> HostStep | DeviceStep:
    """Choose how steps are taken, and say so."""
    compiled = COMPILED[run.compiled]
    if not run.on_device:
        if run.device.type == "cuda":
            reason = "a CUDA graph is for one process, and this run has several"
            say(f"steps: {compiled}, the host takes part in each: {reason}")
        elif run.compiled != "none":
            say(f"steps: {compiled}, the host takes part in each")
        return HostStep(run)
    graph, flag = run.config.train.graph, spell("train.graph", False)
    way = f"as a CUDA graph ({flag} to leave it)" if graph else f"kernel by kernel ({flag})"
    say(f"steps: {way}, {compiled} ({spell('train.compile')} none, layers or model)")
    return DeviceStep(run, partial(host_windows, run), graph=graph, say=say)


def due_after(number: int, config: Config) -> set[str]:
    """List what is to be done after a step: "eval", "depth", "save". After the last one, all."""
    settings = config.train
    intervals = {
        "eval": settings.eval_every,
        "depth": settings.depth_every,
        "save": settings.save_every,
    }
    if number == settings.steps:
        return set(intervals)
    return {name for name, interval in intervals.items() if number % interval == 0}


class HostStep:
    """Steps that the host takes part in: loss and gradient norm are known when a step is done."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def take(self, number: int) -> list[Outcome]:
        run = self.run
        loss = accumulate(run, number)
        gradients = depth_gradients(run) if "depth" in due_after(number, run.config) else None
        grad_norm, rate = update(run, number, loss)
        return [Outcome(number, loss, grad_norm, rate, gradients, load=run.load)]

    def wait(self) -> list[Outcome]:
        return []

    def losses(self, windows: Tensor) -> Tensor:
        return validation_losses(self.run, windows)


def report_step(run: Run, outcome: Outcome, watch: Watch) -> None:
    """Show and log what has become known of a step."""
    number, settings = outcome.number, run.config.train
    if outcome.reason is not None:
        leave_out(run, number, outcome.loss, outcome.grad_norm, outcome.reason, outcome.depth)
    # The line shows every step, the log every few.
    tokens_per_second = watch.clock.tokens_per_second(number)
    watch.line.step(number, outcome.loss, tokens_per_second)
    if number == settings.steps or number % settings.log_every == 0:
        log_update(run, outcome, tokens_per_second)
        watch.clock.rewind(number)
        # A stream that has overflowed gives zeros after its norm, and the run would go on for nothing.
        if outcome.grad_norm == 0 < outcome.loss:
            run.saver.wait()
            why = f"the gradient is zero at step {number} (loss {outcome.loss:.4f})"
            give_up(run, f"{why}, so nothing is learned any more. Try {gentler()}")


def gentler() -> str:
    """Name settings that keep a run from diverging."""
    rates = f"a lower {spell('optim.lr')}, a longer {spell('optim.warmup')}"
    norms = f"a smaller {spell('optim.clip')} or {spell('model.qk_norm', True)}"
    return f"{rates}, {norms}, in another {spell('out')}"


def accumulate(run: Run, number: int) -> float:
    """Gradients of the mean loss over the global batch of update `number`, one micro-batch at a time."""
    settings = run.config.train
    # No state of a generator to save: whatever a step draws depends on its number alone.
    torch.manual_seed((settings.seed << 32) + number)
    if run.pipeline is not None:
        batches = [windows_of(run, number, micro) for micro in range(settings.accumulate)]
        run.own_loss = run.pipeline.accumulate(torch.cat(batches))
        return run.ranks.sum(run.own_loss / run.ranks.token_world)
    total = 0.0
    # Gradients add up; ranks sum them once, with the last micro-batch.
    for micro in range(settings.accumulate):
        defer_reduction(run.model, micro < settings.accumulate - 1)
        losses = token_losses(run, run.forward, windows_of(run, number, micro))
        loss = losses.mean() / settings.accumulate
        loss.backward()
        total += loss.item()
    # Kept for the file that tells which rank a bad step came from.
    run.own_loss = total
    return run.ranks.sum(total / run.ranks.token_world)


def windows_of(run: Run, number: int, micro: int) -> Tensor:
    """This rank's share of a micro-batch of update `number`, (B, T + 1)."""
    return host_windows(run, number, micro).to(run.device)


def host_windows(run: Run, number: int, micro: int) -> Tensor:
    settings, ranks = run.config.train, run.ranks
    batch = run.train.batch(
        seed=settings.seed,
        step=number - 1,
        size=settings.batch_size,
        micro=micro,
        micros=settings.accumulate,
        rank=ranks.data_rank,
        world=ranks.data_world,
    )
    return ranks.own_tokens(torch.from_numpy(batch))


def token_losses(run: Run, forward: Any, windows: Tensor) -> Tensor:
    """Nats of each token after the first of its window, (B, T), in fp32; the model itself runs in bf16 on a GPU."""
    with half_precision(run.device):
        logits = forward(windows[:, :-1])  # (B, T, vocab)
    return nats_per_token(logits, windows[:, 1:])


def update(run: Run, number: int, loss: float) -> tuple[float, float]:
    """Check, clip and step; returns gradient norm and learning rate. A bad gradient never reaches the weights."""
    settings = run.config
    rate = learning_rate(number - 1, settings.train.steps, settings.optim)
    grad_norm = run.ranks.gradient_norm(run.model)
    # All ranks have the same loss and norm, and so decide alike.
    reason = run.skips.judge(loss, grad_norm, settings.train)
    if reason is None:
        clip(run.model, grad_norm, settings.optim.clip)
        set_learning_rate(run.optimizers, rate)
        run.saver.before_update()
        for optimizer in run.optimizers.values():
            optimizer.step()
    else:
        leave_out(run, number, loss, grad_norm, reason, depth_gradients(run))
    # Routers count their loads in every step, also in one that is left out.
    run.load = balance(run.model, run.whole.config, run.ranks, taken=reason is None)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    return grad_norm, rate


def save_step(run: Run, watch: Watch, *, stop: bool) -> None:
    """Save a checkpoint, for as long as it takes.

    While bad steps are left out nothing is saved but the end of the run: saved step by step, weights that have gone bad
    without being seen would soon take the place of every checkpoint that is good.
    """
    last = run.step == run.config.train.steps
    with watch.watchdog.paused():
        if stop:
            run.saver.wait()  # raises if a save in the background has failed
        if run.skips.in_a_row and not last:
            return
        try:
            save(run)
        except NotFinite:
            why = f"weights, or what the optimizer keeps, are not finite after step {run.step}"
            give_up(run, f"{why}. {last_good(run.checkpoints)} Try {gentler()}")
        if stop:
            run.saver.wait()


def leave_out(
    run: Run, number: int, loss: float, grad_norm: float, reason: Reason, depth: list[float] | None
) -> None:
    """Record a step that is not taken; raise if there were too many in a row. Every rank comes here, or none."""
    cause = write_cause(run, number, loss, grad_norm, reason, depth)
    values = {"reason": reason.kind, "loss": loss, "threshold": reason.threshold}
    run.log.write("skip", number, **values, grad_norm=grad_norm)
    if reason.in_a_row > reason.limit:
        run.saver.wait()  # then the last good checkpoint is the last
        why = f"{reason.text} at step {number} (loss {loss}, gradient norm {grad_norm})"
        flags = f"{spell('resume')} and {spell(reason.setting, reason.in_a_row)} (or more)"
        give_up(
            run,
            f"{why}; the weights were left as they were. {last_good(run.checkpoints)} What is known of the step is in "
            f"{cause}. Go on without such steps with {flags}, or try {gentler()}",
        )


def give_up(run: Run, why: str) -> NoReturn:
    """Raise the error that ends a run which diverges.

    Its folder says so too, since the same settings would lead there again.
    """
    if run.ranks.main:
        write_json(run.folder / DIVERGED, {"why": why})
    advice = how_to_test(run.config.model.residual)
    raise UserError(f"{why}. {advice}" if advice else why)


def write_cause(
    run: Run, number: int, loss: float, grad_norm: float, reason: Reason, depth: list[float] | None
) -> Path:
    """Write a file that helps to find out which tokens, rank or depth a bad step came from."""
    # Every rank takes part, since each knows its own loss.
    path, settings = cause_file(run.folder, reason.kind, number), run.config.train
    losses = run.ranks.all_gather_object(run.own_loss)
    # Numbers as text, since JSON has no nan and no infinity, and the difference between them is a clue.
    values = {
        "step": number,
        "batch": {"seed": settings.seed, "step": number - 1, "size": settings.batch_size},
        "loss": [str(loss)],
        "grad_norm": [str(grad_norm)],
        "loss_by_rank": [str(value) for value in losses],
        "grad_norm_by_sublayer": [str(value) for value in depth or []],
    }
    if run.ranks.main:
        write_json(path, values)
    return path


def log_update(run: Run, outcome: Outcome, tokens_per_second: float) -> None:
    values = {"loss": outcome.loss, "lr": outcome.rate, "grad_norm": outcome.grad_norm}
    values |= {"tokens_per_second": tokens_per_second, "seconds": run.elapsed()}
    if outcome.load is not None:
        values |= {"expert_load_cv": outcome.load.cv, "expert_load_max": outcome.load.highest}
    run.log.write("train", outcome.number, tokens=run.tokens_at(outcome.number), **values)


class Clock:
    """Tokens per second since it was last wound."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.since = (run.step, time.monotonic())
        self.rewind()

    def rewind(self, step: int | None = None) -> None:
        """Count from this step on, by default the last one."""
        self.before = self.since
        self.since = (self.run.step if step is None else step, time.monotonic())

    def tokens_per_second(self, step: int) -> float:
        """Two steps that become known together are counted together."""
        now = time.monotonic()
        first, began = self.since if now - self.since[1] > TOGETHER else self.before
        tokens = self.run.tokens_at(step) - self.run.tokens_at(first)
        return tokens / max(now - began, 1e-9)


@torch.no_grad()
def evaluate(run: Run, losses_of: Callable[[Tensor], Tensor] | None = None) -> float:
    """Bits per byte over a fixed set of validation windows, the same for every run with this corpus and context."""
    # A token stands for several bytes, so nats a token are divided by bytes.
    nats, tokens, num_bytes = 0.0, 0, 0
    run.model.eval()
    losses_of = losses_of or partial(validation_losses, run)
    for windows, count in validation_shares(run):
        losses = losses_of(windows)[:count]
        nats += losses.double().sum().item()
        tokens += losses.numel()
        targets = windows[: len(losses), 1:]
        num_bytes += int(run.token_bytes[targets].sum())
    run.model.train()
    reshard(run.model)
    # Every rank has a share of the windows.
    sums = run.ranks.sums([nats, tokens, num_bytes])
    if not math.isfinite(sums[0]):  # the last update destroyed the weights: they are not saved
        nothing = {"loss": math.nan, "bits_per_byte": math.nan}
        run.log.write("eval", run.step, tokens=run.tokens, **nothing)
        run.saver.wait()
        why = f"the validation loss is not finite after step {run.step}"
        give_up(run, f"{why}. {last_good(run.checkpoints)} Try {gentler()}")
    bits = sums[0] / math.log(2)
    run.evaluation = {"loss": sums[0] / sums[1], "bits_per_byte": bits / sums[2]}
    run.log.write("eval", run.step, tokens=run.tokens, **run.evaluation)
    return run.evaluation["bits_per_byte"]


def validation_shares(run: Run) -> Iterator[tuple[Tensor, int]]:
    """Batches of windows for this rank, and how many of them count: several ranks take equal shares, filled up."""
    settings, ranks = run.config.train, run.ranks
    micros = 1 if run.pipeline is not None else settings.accumulate
    # As many windows at a time as a step has.
    share = max(1, settings.batch_size // (micros * ranks.data_world))
    numbers = run.validation.spread(settings.eval_windows)
    # Every rank takes as many batches as the others, since they meet in each.
    for first in range(0, len(numbers), share * ranks.data_world):
        start = first + ranks.data_rank * share
        here = numbers[start : start + share]
        filled = here
        # Shapes must be equal on all ranks, and for a captured step.
        if run.on_device or not ranks.alone:
            padding = np.full(share - len(here), numbers[0])
            filled = np.append(here, padding)
        windows = torch.from_numpy(run.validation.take(filled))
        yield ranks.own_tokens(windows), len(here)


def validation_losses(run: Run, windows: Tensor) -> Tensor:
    """(B, T); of a pipeline, only its last rank knows them, and the others have none."""
    windows = windows.to(run.device)
    if run.pipeline is None:
        return token_losses(run, run.model, windows)
    # Only the last rank of a pipeline has logits.
    logits = run.pipeline.logits(windows)
    if logits is None:
        return windows.new_empty(0, windows.shape[1] - 1)
    return nats_per_token(logits, windows[:, 1:])


def depth_gradients(run: Run) -> list[float]:
    # One process has all gradients.
    if run.ranks.alone:
        return gradient_norms(run.whole)
    squares = [0.0] * len(run.whole.sublayers)
    for name, parameter in run.model.named_parameters():
        # A rank has parts of some sublayers; squares add up over the ranks.
        if name.startswith("sublayers."):
            squares[int(name.split(".")[1])] += squared_norm(parameter.grad)
    return [square**0.5 for square in run.ranks.sums(squares)]


def log_depth(run: Run, gradients: list[float] | None) -> None:
    """Always the same tokens, the first validation window, so that records differ by the weights alone."""
    tokens = torch.from_numpy(run.validation.take(run.validation.spread(1)))
    window = tokens[:, :-1].to(run.device)
    model = run.whole if run.ranks.alone else gather_model(run)
    if model is not None:
        # The window has another shape than a step: it is not worth a compilation.
        with torch.compiler.set_stance("force_eager"):
            values = depth_record(model, window)
        run.log.write("depth", run.step, tokens=run.tokens, gradient_norm=gradients, **values)


def gather_model(run: Run) -> Decoder | None:
    """The whole model on the main rank, for a look at it; every rank takes part."""
    # All ranks send; the main one builds the model from it.
    weights = gather(run.model, run.whole, run.ranks)
    if not run.ranks.main:
        return None
    model = Decoder(run.whole.config)
    model.load_weights(weights)
    return model.to(run.device)
