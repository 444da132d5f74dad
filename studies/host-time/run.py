"""Time of the host in an eager step, per sublayer.

    PYTHONPATH=. python studies/host-time/run.py [--profile] [SPEC...]
    PYTHONPATH=. python studies/host-time/run.py --device cuda         # 256 tokens of width 256, bf16, nothing left out

On a CPU: kernels are kept and launched as on a GPU, but for the driver's call at the end, which is left out, and
tensors are small enough that PyTorch's own arithmetic hardly counts. What remains is Python, autograd and allocation,
in CPU time of this process, the least of several steps. A GPU adds its driver: about 3 us a launch, and more in
PyTorch's own.
"""

import argparse
import cProfile
import pstats
import time

import torch
from torch import Tensor

from benchmarks.arms import Stack, fill
from benchmarks.kernels import without_driver

TOKENS, WIDTH, SUBLAYERS, STEPS = 8, 64, 48, 40
SPECS = ("standard", "attnres-block:block=6,backend=triton", "attnres-full:backend=triton")
calls = 0


def count(*_: object) -> None:
    global calls
    calls += 1


def measure(spec: str, profile: bool) -> tuple[float, float, float]:
    """Microseconds and launches a sublayer: forward, backward, launches of both."""
    stack = Stack(spec, WIDTH, SUBLAYERS)
    fill(stack)
    x, seed = (torch.randn(TOKENS, WIDTH) for _ in range(2))
    forward, backward = [], []
    profiler = cProfile.Profile()
    for number in range(STEPS):
        stack.zero_grad(set_to_none=True)
        before = calls
        if profile and number > 3:
            profiler.enable()
        start = time.process_time()
        out = stack(x)
        middle = time.process_time()
        out.backward(seed)
        end = time.process_time()
        profiler.disable()
        forward.append(middle - start)
        backward.append(end - middle)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    return (
        min(forward) / SUBLAYERS * 1e6,
        min(backward) / SUBLAYERS * 1e6,
        (calls - before) / SUBLAYERS,
    )


def measure_gpu(spec: str) -> tuple[float, float, float]:
    """Microseconds a sublayer by the clock until the host has launched all: forward, backward; and until the GPU is
    done. The lower quartile of several steps: a host has other work at times."""
    stack = Stack(spec, 256, SUBLAYERS).to("cuda", torch.bfloat16)
    fill(stack)
    x, seed = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = [timed_step(stack, x, seed) for _ in range(STEPS)][4:]
    return tuple(sorted(column)[len(column) // 4] / SUBLAYERS * 1e6 for column in zip(*found))  # type: ignore[return-value]


def timed_step(stack: Stack, x: Tensor, seed: Tensor) -> tuple[float, float, float]:
    stack.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = stack(x)
    middle = time.perf_counter()
    out.backward(seed)
    end = time.perf_counter()
    torch.cuda.synchronize()
    return middle - start, end - middle, time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("specs", nargs="*", default=SPECS)
    options = parser.parse_args()
    if options.device == "cuda":
        for spec in (
            spec.replace(",backend=triton", "").replace(":backend=triton", "")
            for spec in options.specs
        ):
            forward, backward, whole = measure_gpu(spec)
            print(
                f"{spec}  forward {forward:.0f}  backward {backward:.0f}  until done {whole:.0f} us a sublayer"
            )
        raise SystemExit
    without_driver(count, count)
    for spec in options.specs:
        forward, backward, launches = measure(spec, options.profile)
        print(
            f"{spec}  forward {forward:.0f}  backward {backward:.0f}  sum {forward + backward:.0f} us a sublayer",
            end="",
        )
        print(f"  launches {launches:.1f}", flush=True)
