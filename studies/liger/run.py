"""Tokens per second of a compiled training step at 50M: headwater's rotary and SwiGLU kernels beside Liger's.

    PYTHONPATH=. python studies/liger/run.py --out FILE    # one H200, liger-kernel 0.8.5, about 70 seconds

Arms take turns in one process, as in benchmarks.speed:
    own           headwater's kernels, which take the joined projection as it is
    operators     PyTorch's operators, compiled with the layer
    liger         Liger's rope and SiLUMul as Liger patches models: separate products for q, k, v, gate and up
    liger-joined  Liger's behind the joined products; its parts are copied, since Liger takes contiguous tensors
    liger-rope    Liger's rope behind the joined product, headwater's SwiGLU
    liger-swiglu  Liger's SiLUMul behind the joined product, headwater's rotary
Before it is timed, an arm's first loss must be the first arm's to 0.1 percent.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import speed
from headwater.models.attention import Attention
from headwater.models.mlp import SwiGLU
from headwater.models.projection import project_joined
from headwater.ops.rotary import split_heads

ARMS = ("own", "operators", "liger", "liger-joined", "liger-rope", "liger-swiglu")
STEPS, ALIKE = 10, 1e-3


def liger_turned(joined: bool) -> Any:
    from liger_kernel.ops.rope import LigerRopeFunction

    def turned(self: Attention, x: Any, rotary: Any, cached: bool) -> Any:
        if joined:
            parts = project_joined(x, self.query, self.key, self.value)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = split_heads(parts, (self.heads, self.kv_heads, self.kv_heads))
        cos, sin = (torch.cat((table, table), -1).unsqueeze(0) for table in rotary)
        q, k = LigerRopeFunction.apply(q, k, cos.to(q.dtype), sin.to(q.dtype))
        return q, k, v

    return turned


def liger_swiglu(joined: bool) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def forward(self: SwiGLU, x: Any) -> Any:
        if joined:
            parts = project_joined(x, self.gate, self.up)
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.output(LigerSiLUMulFunction.apply(gate, up))

    return forward


@contextmanager
def patched(arm: str) -> Iterator[None]:
    """The decoder's parts as the arm has them; they are captured before this ends."""
    kept = Attention._turned, SwiGLU.forward, Attention.backend, SwiGLU.backend
    joined = arm != "liger"
    try:
        if arm == "operators":
            Attention.backend = SwiGLU.backend = "reference"
        if arm in ("liger", "liger-joined", "liger-rope"):
            Attention._turned = liger_turned(joined)
        if arm in ("liger", "liger-joined", "liger-swiglu"):
            SwiGLU.forward = liger_swiglu(joined)
        yield
    finally:
        Attention._turned, SwiGLU.forward, Attention.backend, SwiGLU.backend = kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", default="50m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=85, help="seconds in all")
    options = parser.parse_args()
    began = time.monotonic()
    results: dict[str, Any] = {}
    arms: dict[str, speed.Arm] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ARMS:
            torch.compiler.reset()
            if time.monotonic() - began > options.limit / 2:
                results[name] = {"failed": "no time was left for it"}
                continue
            try:
                with patched(name):
                    arm = speed.Arm("standard", options.size, Path(folder) / name, options.device)
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                print(name, results[name], file=sys.stderr, flush=True)
                continue
            results[name] = dict(arm.record)
            first = results["own"]["first_loss"] if "own" in arms else arm.record["first_loss"]
            alike = abs(arm.record["first_loss"] - first) < ALIKE * first
            print(name, arm.record, "alike" if alike else "NOT ALIKE", file=sys.stderr, flush=True)
            if alike:
                arms[name] = arm
            else:
                results[name]["failed"] = "its first loss is another"
        names = list(arms)
        for number in range(options.rounds):
            if time.monotonic() - began > options.limit:
                break
            start = number % len(names)
            for name in names[start:] + names[:start]:
                arms[name].go(STEPS)
                arms[name].rates.append(arms[name].go(STEPS))
    base = None
    for name, arm in arms.items():
        rates = sorted(arm.rates)
        median = statistics.median(rates)
        base = base or median
        spread = {"p20": rates[len(rates) // 5], "p80": rates[-1 - len(rates) // 5]}
        results[name] |= {"tokens_per_second": median, **spread, "rounds": len(rates)}
        low, high = spread["p20"] / 1e3, spread["p80"] / 1e3
        share = median / base
        print(
            f"{name:14} {median / 1e3:8.1f} thousand tokens/s ({low:.1f} to {high:.1f}), {share:.1%} of own"
        )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
