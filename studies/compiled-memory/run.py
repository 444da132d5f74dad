"""Peak memory of a training step, eager and compiled: `PYTHONPATH=. python studies/compiled-memory/run.py SPEC@N...`.

N is the number of sublayers. On a CPU, without kernels, so that only what is allocated and kept remains; the unit is
one (tokens x width) tensor. Inductor orders a graph for a CPU otherwise than for a GPU: the test of
tests/ops/test_kernels_gpu.py has the last word.
"""

import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from benchmarks.arms import Stack, fill

TOKENS, WIDTH = 1024, 128


def peak(step) -> float:
    step()
    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top / (TOKENS * WIDTH * 2)


def measure(spec: str, sublayers: int, *, compiled: bool) -> float:
    torch.compiler.reset()
    stack = Stack(spec, WIDTH, sublayers).bfloat16()
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
    for name in ("triton.launch", "depth.merge", "depth.mix", "depth.score"):
        importlib.import_module(f"headwater.ops.{name}").launch = lambda *_, **__: None
    for case in sys.argv[1:]:
        spec, sublayers = case.split("@")
        eager, compiled = (
            measure(spec, int(sublayers), compiled=compiled) for compiled in (False, True)
        )
        print(f"{case}  eager {eager:.1f}  compiled {compiled:.1f}", flush=True)
