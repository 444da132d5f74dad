"""One training step of a decoder behind a residual: ours eager, ours compiled, or its plain formula compiled.

A worker of `benchmarks.residuals`: it builds, compiles and runs once, says `ready`, waits for a line on its input, and
then prints one JSON line for each arm. So many can compile at once, and only one measures at a time.
"""

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.models import Decoder, ModelConfig
from headwater.residuals.base import Read, apply_norm
from headwater.train.arms import parse_arm
from tests.formulas import formula_of

from .measure import captured

ARMS = ("eager", "compiled", "formula")
SHAPE = {"dim": 512, "heads": 8, "kv_heads": 8, "mlp_dim": 1408, "vocab_size": 512}


class PlainDecoder(nn.Module):
    """The decoder's weights with the residual's formula instead of its class. As in the class, the formula runs in
    fp32 whatever the sublayers do: gates read off small differences of a large stream."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model, self.formula = model, formula_of(model.residual, model.config.kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        model, device = self.model, tokens.device.type
        low = torch.is_autocast_enabled(device)
        rotary = model.rotary(0, tokens.shape[1])

        def run(i: int, read: Read) -> Tensor:
            sublayer: Any = model.sublayers[i]
            with torch.autocast(device, torch.bfloat16, enabled=low):
                x = apply_norm(sublayer.norm, read)
                y = sublayer.body(x) if sublayer.kind == "mlp" else sublayer.body(x, rotary)[0]
            return y.float()

        with torch.autocast(device, enabled=False):
            x = self.formula(model.embedding(tokens), run)
        return model.head(model.norm(x))


def build(spec: str, layers: int, context: int, device: str) -> Decoder:
    """The residual's parameters are moved off their start, where gates of zero would hide a wrong formula. The stream
    is in fp32 in every arm: in bf16 ours would move half the formula's bytes. `spec` may have switches of the model
    behind it, standard+shortswa=4, as the arms of a comparison have."""
    torch.manual_seed(0)
    arm = parse_arm(spec)
    shape = {**SHAPE, "layers": layers, "context": context, "fp32_stream": True, **arm.switches}
    model = Decoder(ModelConfig(**shape, residual=arm.residual))
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model.to(device)


def step_of(model: Decoder, arm: str, tokens: Tensor) -> Callable[[], Tensor]:
    """Forward, backward and the gradients' reset; bf16 autocast on a GPU, fp32 on a CPU. Gives the loss."""
    device = tokens.device.type
    forward = PlainDecoder(model) if arm == "formula" else model
    run = forward if arm == "eager" else torch.compile(forward, dynamic=False, fullgraph=True)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = run(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


def measure(step: Callable[[], Any], device: str, repeats: int, before: int) -> dict[str, float]:
    """Median, p20 and p80; peak memory above what the process held `before` anything was built. A GPU replays the step
    as a CUDA graph, as `headwater train` does: the host's time varies by a third between processes."""
    loss, run, peak = step().item(), step, 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        run = captured(step)
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    at = {
        name: 1e3 * seconds[len(seconds) * share // 10]
        for name, share in (("p20", 2), ("ms", 5), ("p80", 8))
    }
    return {**at, "peak_mib": peak / 2**20, "loss": loss}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def work(flags: argparse.Namespace) -> None:
    before = resident_bytes()
    model = build(flags.residual, flags.layers, flags.context, flags.device)
    shape = (flags.batch, flags.context + 1)
    tokens = torch.randint(
        0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(1)
    ).to(flags.device)
    steps, rows = {}, []
    for arm in flags.arms:
        row: dict[str, Any] = {"residual": flags.residual, "arm": arm, "layers": flags.layers}
        start = time.perf_counter()
        steps[arm] = step_of(model, arm, tokens)
        try:
            steps[arm]()
            synchronize(flags.device)
        except torch.OutOfMemoryError:
            pass  # others compile on the same device; when it is this one's turn, it has it for itself
        except (
            RuntimeError
        ) as error:  # the compiler's errors among them: the other arms are measured all the same
            row["error"] = str(error).strip().splitlines()[0]
        rows.append({**row, "first_step_s": time.perf_counter() - start})
        release(model, flags.device)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # whoever asked is gone
    for row in rows:
        measured = (
            {}
            if "error" in row
            else measure(steps[row["arm"]], flags.device, flags.repeats, before)
        )
        print(json.dumps(row | measured), flush=True)
        release(model, flags.device)


def release(model: Decoder, device: str) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residual_step")
    parser.add_argument("--residual", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, required=True)
    parser.add_argument("--device", required=True)
    for name in ("layers", "batch", "context", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    work(parser.parse_args())


if __name__ == "__main__":
    main()
