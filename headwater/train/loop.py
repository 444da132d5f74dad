"""A training run, readable from top to bottom: `train` is the run, the rest are its parts in the order it meets them.

Every update is a function of the configuration, its number and the weights alone, so that a resumed run repeats
exactly what an undisturbed one does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.models import Decoder
from headwater.residuals import plugin_of
from headwater.residuals.plugins import flags_for
from headwater.residuals.registry import how_to_test, suspected
from headwater.train.balance import balance
from headwater.train.checkpoint.folder import last_good
from headwater.train.config import Config, check
from headwater.train.device_step import DeviceStep, Outcome
from headwater.train.distributed.fsdp import clip, defer_reduction, gather, reshard
from headwater.train.distributed.parts import squared_norm
from headwater.train.distributed.ranks import gathered
from headwater.train.files import locked, write_json
from headwater.train.losses import half_precision, nats_per_token
from headwater.train.monitor import loggers
from headwater.train.monitor.bad_steps import Reason, cause_file
from headwater.train.monitor.depth import depth_record, gradient_norms
from headwater.train.monitor.interrupts import RESUME, Interruption
from headwater.train.monitor.progress import ProgressLine
from headwater.train.monitor.watchdog import Watchdog
from headwater.train.optim import ends_in_warmup, learning_rate, set_learning_rate
from headwater.train.results import DIVERGED, SUMMARY, TrainResult
from headwater.train.run import Run, begin, choose_device, finish, save

TOGETHER = 1e-3  # seconds; no step is shorter
DUE = ("eval", "depth", "save")  # what may be due after a step, each with its interval
FAILED = 1000  # above every signal: a save in the background has failed


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

        config = Config(model=ModelSettings(size="nano", residual="attnres-block"), train=TrainSettings(steps=100))
        print(train(config, "runs/first").bits_per_byte)
    """
    config, out = check(config), at_home(out)
    settings = config.train
    if resume and not (out / "config.json").exists():
        raise UserError(
            f"there is no run at {out} to resume: check --out, or leave --resume out to start one"
        )
    loggers.require(config.log)
    with (
        suspected(config.model.residual),
        gathered(config.parallel, choose_device(config)) as ranks,
        locked(out) if ranks.main else nullcontext(),
    ):
        run = begin(config, out, resume=resume, ranks=ranks)
        if run.step == settings.steps and (
            result := ranks.broadcast_object(result_in(out) if ranks.main else None)
        ):
            return result
        line = ProgressLine(
            "training", run.step, settings.steps, Console(quiet=not (progress and ranks.main))
        )
        watchdog = Watchdog(0 if ranks.alone else config.parallel.hang_timeout)
        if ranks.main:
            run.log.mirrors = loggers.start(config.log, out, run.step, run.identity)
        with closing(run.log), Interruption() as interruption, watchdog, line, run.saver:
            if resume and not run.step:
                every = f"one is written every {settings.save_every} steps"
                line.say(
                    f"no checkpoint in {out / 'checkpoints'} to go on from ({every}): the run begins anew"
                )
            if run.planned:
                line.say(goes_further(run))
            if said := ends_in_warmup(settings.steps, config.optim):
                line.say(said)
            clock, steps = Clock(run), steps_of(run, line.say)
            for number in range(run.step + 1, settings.steps + 1):
                watchdog.reset()
                last = number == settings.steps
                known = steps.take(number)
                run.step = number
                # Ranks act on what they have compared: a signal that comes after it waits for the next step.
                asked = ranks.max(FAILED if run.saver.failed else interruption.signum)
                due = {
                    name for name in DUE if last or number % getattr(settings, f"{name}_every") == 0
                }
                if due or asked:
                    known += steps.wait()
                for outcome in known:
                    report_step(run, outcome, line, clock)
                if "eval" in due:
                    line.say(
                        f"step {number}: validation {evaluate(run, steps.losses):.4f} bits per byte"
                    )
                if "depth" in due:
                    log_depth(run, known[-1].depth)
                clock.rewind() if due & {"eval", "depth"} else None
                if asked == FAILED:  # some have yet to notice
                    run.saver.wait()
                if "save" in due or asked:
                    save(run)
                if asked and not last:
                    run.saver.wait()
                    interruption.signum = asked
                    own = flags_for([plugin_of(config.model.residual)])
                    go_on = f"headwater train --out {quote(str(out))}{own}{RESUME}"
                    raise interruption.error(f"step {number} of {settings.steps}", go_on)
        return finish(run)


def goes_further(run: Run) -> str:
    """A schedule stretched over more steps does not go on where it was: said, since it shows in the loss."""
    settings, planned = run.config, run.planned or 0
    before, now = (
        learning_rate(run.step, steps, settings.optim) for steps in (planned, settings.train.steps)
    )
    said = f"goes to {settings.train.steps} steps, where {planned} were planned"
    rates = [f"{rate:.3g}" for rate in (now, before)]
    if len(set(rates)) == 1:  # a run that had not left its warm-up
        return said
    return f"{said}: from step {run.step} on the learning rate is now {rates[0]} and would have been {rates[1]}"


def steps_of(run: Run, say: Callable[[str], None]) -> HostStep | DeviceStep:
    """How steps are taken, and a line that says so."""
    settings = run.config.train
    compiled = {
        "none": "nothing compiled",
        "layers": "layers compiled",
        "model": "the model compiled",
    }[run.compiled]
    if not run.on_device:
        if run.device.type == "cuda" or run.compiled != "none":
            reason = (
                ""
                if run.device.type != "cuda"
                else ": a CUDA graph is for one process, and this run has several"
            )
            say(f"steps: {compiled}, the host takes part in each{reason}")
        return HostStep(run)
    graph = (
        "as a CUDA graph (--no-graph to leave it)"
        if settings.graph
        else "kernel by kernel (--no-graph)"
    )
    say(f"steps: {graph}, {compiled} (--compile none, layers or model)")
    return DeviceStep(
        run, lambda number, micro: host_windows(run, number, micro), graph=settings.graph, say=say
    )


class HostStep:
    """Steps that the host takes part in: loss and gradient norm are known when a step is done."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def take(self, number: int) -> list[Outcome]:
        run, settings = self.run, self.run.config.train
        loss = accumulate(run, number)
        depth = number == settings.steps or number % settings.depth_every == 0
        gradients = depth_gradients(run) if depth else None
        grad_norm, rate = update(run, number, loss)
        return [Outcome(number, loss, grad_norm, rate, gradients, load=run.load)]

    def wait(self) -> list[Outcome]:
        return []

    def losses(self, windows: Tensor) -> Tensor:
        return validation_losses(self.run, windows)


def report_step(run: Run, outcome: Outcome, line: ProgressLine, clock: Clock) -> None:
    """Show and log what has become known of a step."""
    number, settings = outcome.number, run.config.train
    if outcome.reason is not None:
        leave_out(run, number, outcome.loss, outcome.grad_norm, outcome.reason, outcome.depth)
    line.step(number, outcome.loss, clock.tokens_per_second(number))
    if number == settings.steps or number % settings.log_every == 0:
        log_update(run, outcome, clock.tokens_per_second(number))
        clock.rewind(number)
        if outcome.grad_norm == 0 < outcome.loss:
            run.saver.wait()
            raise diverged(
                run,
                f"the gradient is zero at step {number} (loss {outcome.loss:.4f}), so nothing is learned any more: the "
                "stream may have overflowed, and a norm make zeros of it. Try a lower --lr, a longer --warmup, a "
                "smaller --clip or --qk-norm True, in another --out",
            )


def result_in(out: Path) -> TrainResult | None:
    return TrainResult.read(out) if (out / SUMMARY).exists() else None


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
    for micro in range(settings.accumulate):
        defer_reduction(run.model, micro < settings.accumulate - 1)
        loss = (
            token_losses(run, run.forward, windows_of(run, number, micro)).mean()
            / settings.accumulate
        )
        loss.backward()
        total += loss.item()
    run.own_loss = total
    return run.ranks.sum(total / run.ranks.token_world)


def windows_of(run: Run, number: int, micro: int) -> Tensor:
    """This rank's share of a micro-batch of update `number`, (B, T + 1)."""
    return host_windows(run, number, micro).to(run.device)


def host_windows(run: Run, number: int, micro: int) -> Tensor:
    settings, ranks = run.config.train, run.ranks
    parts = {
        "micro": micro,
        "micros": settings.accumulate,
        "rank": ranks.data_rank,
        "world": ranks.data_world,
    }
    batch = run.train.batch(seed=settings.seed, step=number - 1, size=settings.batch_size, **parts)
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
    reason = run.skips.judge(loss, grad_norm, settings.train)
    if reason is None:
        clip(run.model, grad_norm, settings.optim.clip)
        set_learning_rate(run.optimizers, rate)
        run.saver.before_update()
        for optimizer in run.optimizers.values():
            optimizer.step()
    else:
        leave_out(run, number, loss, grad_norm, reason, depth_gradients(run))
    run.load = balance(run.model, run.whole.config, run.ranks, taken=reason is None)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    return grad_norm, rate


def leave_out(
    run: Run, number: int, loss: float, grad_norm: float, reason: Reason, depth: list[float] | None
) -> None:
    """Record a step that is not taken; raise if there were too many in a row. Every rank comes here, or none."""
    cause = write_cause(run, number, loss, grad_norm, reason, depth)
    run.log.write(
        "skip",
        number,
        reason=reason.kind,
        loss=loss,
        threshold=reason.threshold,
        grad_norm=grad_norm,
    )
    if reason.in_a_row > reason.limit:
        run.saver.wait()  # then the last good checkpoint is the last
        raise diverged(
            run,
            f"{reason.text} at step {number} (loss {loss}, gradient norm {grad_norm}); the weights were left "
            f"as they were. {last_good(run.folder / 'checkpoints')} What is known of the step is in {cause}. "
            f"Go on without such steps with --resume and {reason.flag} {reason.in_a_row} (or more), or try a lower "
            "--lr, a longer --warmup, a smaller --clip or --qk-norm True, in another --out",
        )


def diverged(run: Run, why: str) -> UserError:
    """The error with which a run gives up; its folder says so too, since the same settings would lead there again."""
    if run.ranks.main:
        write_json(run.folder / DIVERGED, {"why": why})
    return UserError(". ".join(filter(None, (why, how_to_test(run.config.model.residual)))))


def write_cause(
    run: Run, number: int, loss: float, grad_norm: float, reason: Reason, depth: list[float] | None
) -> Path:
    """What helps to find out which tokens, rank or depth it came from."""
    path, settings = cause_file(run.folder, reason.kind, number), run.config.train
    losses = run.ranks.all_gather_object(run.own_loss)
    if run.ranks.main:
        batch = {"seed": settings.seed, "step": number - 1, "size": settings.batch_size}
        values = {
            "loss": [loss],
            "grad_norm": [grad_norm],
            "loss_by_rank": losses,
            "grad_norm_by_sublayer": depth or [],
        }
        # As text, since JSON has no nan and no infinity, and the difference between them is a clue.
        write_json(
            path,
            {"step": number, "batch": batch}
            | {key: list(map(str, v)) for key, v in values.items()},
        )
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
        return (self.run.tokens_at(step) - self.run.tokens_at(first)) / max(now - began, 1e-9)


@torch.no_grad()
def evaluate(run: Run, losses_of: Callable[[Tensor], Tensor] | None = None) -> float:
    """Bits per byte over a fixed set of validation windows, the same for every run with this corpus and context."""
    nats, tokens, num_bytes = 0.0, 0, 0
    run.model.eval()
    for windows, count in validation_shares(run):
        losses = (losses_of or partial(validation_losses, run))(windows)[:count]
        nats += losses.double().sum().item()
        tokens += losses.numel()
        num_bytes += int(run.token_bytes[windows[: len(losses), 1:]].sum())
    run.model.train()
    reshard(run.model)
    sums = run.ranks.sums([nats, tokens, num_bytes])
    if not math.isfinite(sums[0]):  # the last update destroyed the weights: they are not saved
        run.log.write("eval", run.step, tokens=run.tokens, loss=math.nan, bits_per_byte=math.nan)
        run.saver.wait()
        raise diverged(
            run,
            f"the validation loss is not finite after step {run.step}. {last_good(run.folder / 'checkpoints')} "
            "Try a lower --lr or a longer --warmup, in another --out",
        )
    run.evaluation = {"loss": sums[0] / sums[1], "bits_per_byte": sums[0] / math.log(2) / sums[2]}
    run.log.write("eval", run.step, tokens=run.tokens, **run.evaluation)
    return run.evaluation["bits_per_byte"]


def validation_shares(run: Run) -> Iterator[tuple[Tensor, int]]:
    """Batches of windows for this rank, and how many of them count: several ranks take equal shares, filled up."""
    settings, ranks = run.config.train, run.ranks
    micros = 1 if run.pipeline is not None else settings.accumulate
    share = max(1, settings.batch_size // (micros * ranks.data_world))
    chosen = run.validation.spread(settings.eval_windows)
    for start in range(
        ranks.data_rank * share, len(chosen) + ranks.data_rank * share, share * ranks.data_world
    ):
        mine = chosen[start : start + share]
        same_size = run.on_device or not ranks.alone
        filler = [chosen[0]] * (share - len(mine)) if same_size else []
        windows = torch.from_numpy(run.validation.take(np.append(mine, filler).astype(np.int64)))
        yield ranks.own_tokens(windows), len(mine)


def validation_losses(run: Run, windows: Tensor) -> Tensor:
    """(B, T); of a pipeline, only its last rank knows them, and the others have none."""
    windows = windows.to(run.device)
    if run.pipeline is None:
        return token_losses(run, run.model, windows)
    logits = run.pipeline.logits(windows)
    return (
        windows.new_empty(0, windows.shape[1] - 1)
        if logits is None
        else nats_per_token(logits, windows[:, 1:])
    )


def depth_gradients(run: Run) -> list[float]:
    if run.ranks.alone:
        return gradient_norms(run.whole)
    squares = [0.0] * len(run.whole.sublayers)
    for name, parameter in run.model.named_parameters():
        if name.startswith("sublayers."):
            squares[int(name.split(".")[1])] += squared_norm(parameter.grad)
    return [square**0.5 for square in run.ranks.sums(squares)]


def log_depth(run: Run, gradients: list[float] | None) -> None:
    """Always the same tokens, the first validation window, so that records differ by the weights alone."""
    window = torch.from_numpy(run.validation.take(run.validation.spread(1)))[:, :-1].to(run.device)
    model = run.whole if run.ranks.alone else gather_model(run)
    if model is not None:
        with torch.compiler.set_stance(
            "force_eager"
        ):  # of another shape than a step: not worth a compilation
            found = depth_record(model, window)
        run.log.write("depth", run.step, tokens=run.tokens, gradient_norm=gradients, **found)


def gather_model(run: Run) -> Decoder | None:
    """The whole model on the main rank, for a look at it; every rank takes part."""
    weights = gather(run.model, run.whole, run.ranks)
    if not run.ranks.main:
        return None
    model = Decoder(run.whole.config)
    model.load_weights(weights)
    return model.to(run.device)
