"""Peak memory of a training step, eager and compiled: `PYTHONPATH=. python studies/compiled-memory/run.py SPEC...`.

On a CPU, without kernels, so that only what is allocated and kept remains; the unit is one (tokens x width) tensor.
"""

import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from benchmarks.arms import Stack, fill

TOKENS, WIDTH, SUBLAYERS = 1024, 128, 24


def peak(step) -> float:
    step()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top / (TOKENS * WIDTH * 2)


def measure(spec: str, *, compiled: bool) -> float:
    torch._dynamo.reset()
    stack = Stack(spec, WIDTH, SUBLAYERS).bfloat16()
    fill(stack)
    forward = torch.compile(stack) if compiled else stack
    x, seed = (torch.randn(TOKENS, WIDTH).bfloat16() for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        stack.zero_grad(set_to_none=True)
        x.grad = None
        forward(x).backward(seed)

    return peak(step)


if __name__ == "__main__":
    for name in ("common", "merge", "mix", "score"):
        importlib.import_module(f"headwater.ops.kernels.{name}").launch = lambda *_, **__: None
    for spec in sys.argv[1:]:
        for compiled in (False, True):
            print(f"{spec}  {'compiled' if compiled else 'eager'}  {measure(spec, compiled=compiled):.1f}", flush=True)
