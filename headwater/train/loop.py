"""A training run, readable from top to bottom: `train` is the run, the rest are its parts in the order it meets them.

Every update is a function of the configuration, its number and the weights alone, so that a resumed run repeats
exactly what an undisturbed one does.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.errors import UserError
from headwater.train.checkpoint import last_good
from headwater.train.config import Config, check
from headwater.train.depth import depth_record, gradient_norms
from headwater.train.folder import locked, read_json
from headwater.train.interrupt import Interruption
from headwater.train.optim import learning_rate, set_learning_rate
from headwater.train.progress import ProgressLine
from headwater.train.run import Run, begin, finish, save


def train(config: Config, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Train until `config.train.steps` updates are done; returns what summary.json then holds."""
    settings = check(config).train
    with locked(out):
        run = begin(config, out, resume=resume)
        if run.step == settings.steps and (out / "summary.json").exists():
            return read_json(out / "summary.json")
        with Interruption() as interruption, ProgressLine("training", run.step, settings.steps) as progress:
            clock = Clock(run)
            for number in range(run.step + 1, settings.steps + 1):
                last = number == settings.steps
                loss = accumulate(run, number)
                gradients = gradient_norms(run.model) if last or number % settings.depth_every == 0 else None
                grad_norm, rate = update(run, number, loss)

                run.step = number
                progress.update(number, loss, clock.tokens_per_second())
                if last or number % settings.log_every == 0:
                    log_update(run, loss, rate, grad_norm, clock.tokens_per_second())
                    clock.rewind()
                if last or number % settings.eval_every == 0:
                    progress.say(f"step {number}: validation {evaluate(run):.4f} bits per byte")
                if gradients:
                    log_depth(run, gradients)
                if last or number % settings.save_every == 0 or interruption.signum:
                    save(run)
                if interruption.signum and not last:
                    raise interruption.error(f"step {number} of {settings.steps}", f"headwater train --out {out}")
        return finish(run)


def accumulate(run: Run, number: int) -> float:
    """Gradients of the mean loss over the global batch of update `number`, one micro-batch at a time."""
    settings = run.config.train
    # No state of a generator to save: whatever a step draws depends on its number alone.
    torch.manual_seed((settings.seed << 32) + number)
    total = 0.0
    for micro in range(settings.accumulate):
        batch = run.train.batch(
            seed=settings.seed, step=number - 1, size=settings.batch_size, micro=micro, micros=settings.accumulate
        )
        loss = token_losses(run, run.forward, torch.from_numpy(batch).to(run.device)).mean() / settings.accumulate
        loss.backward()
        total += loss.item()
    return total


def token_losses(run: Run, forward: Any, windows: Tensor) -> Tensor:
    """Nats of each token after the first of its window, (B, T), in fp32; the model itself runs in bf16 on a GPU."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=run.device.type == "cuda"):
        logits = forward(inputs)  # (B, T, vocab)
    return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


def update(run: Run, number: int, loss: float) -> tuple[float, float]:
    """Clip, check and step; returns gradient norm and learning rate. A bad gradient never reaches the weights."""
    settings = run.config
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), settings.optim.clip).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise UserError(
            f"the loss is not finite at step {number} (loss {loss}, gradient norm {grad_norm}); the weights were left "
            f"as they were. {last_good(run.folder / 'checkpoints')} "
            "Try a lower --lr, a longer --warmup, a smaller --clip or --qk-norm True, in another --out"
        )
    rate = learning_rate(number - 1, settings.train.steps, settings.optim)
    set_learning_rate(run.optimizers, rate)
    for optimizer in run.optimizers.values():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm, rate


def log_update(run: Run, loss: float, rate: float, grad_norm: float, tokens_per_second: float) -> None:
    values = {"loss": loss, "lr": rate, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second}
    run.log.write("train", run.step, tokens=run.tokens, **values, seconds=run.elapsed())


class Clock:
    """Tokens per second since it was last wound."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rewind()

    def rewind(self) -> None:
        self.tokens, self.time = self.run.tokens, time.monotonic()

    def tokens_per_second(self) -> float:
        return (self.run.tokens - self.tokens) / max(time.monotonic() - self.time, 1e-9)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Bits per byte over a fixed set of validation windows, the same for every run with this corpus and context."""
    share = max(1, run.config.train.batch_size // run.config.train.accumulate)
    chosen = run.validation.spread(run.config.train.eval_windows)
    nats, tokens, num_bytes = 0.0, 0, 0
    run.model.eval()
    for start in range(0, len(chosen), share):
        windows = torch.from_numpy(run.validation.take(chosen[start : start + share]))
        losses = token_losses(run, run.model, windows.to(run.device))
        nats += losses.double().sum().item()
        tokens += losses.numel()
        num_bytes += int(run.token_bytes[windows[:, 1:]].sum())
    run.model.train()
    run.evaluation = {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / num_bytes}
    run.log.write("eval", run.step, tokens=run.tokens, **run.evaluation)
    return run.evaluation["bits_per_byte"]


def log_depth(run: Run, gradients: list[float]) -> None:
    """Always the same tokens, the first validation window, so that records differ by the weights alone."""
    window = torch.from_numpy(run.validation.take(run.validation.spread(1)))[:, :-1].to(run.device)
    run.log.write("depth", run.step, tokens=run.tokens, gradient_norm=gradients, **depth_record(run.model, window))
