"""The training schedule's error on a CPU, for the cases of tests/test_kernels_gpu.py and with a GPU's own draws.

PYTHONPATH=. python studies/schedule-accuracy/run.py attnres-full 123,1000,4096,7168 bfloat16,float16,float32

Kernels run in Triton's interpreter, which is made to round fp32 to bf16 as a GPU does; inputs are what CUDA's generator
draws for seed 1 (Philox, Box-Muller). One line a case: the largest errors over twice plain PyTorch's plus 1e-5, each
with our error, plain PyTorch's, and the tensor. Minutes a case at widths of thousands.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from benchmarks.arms import ReadEverySublayer, Stack, fill, reference_read
from benchmarks.attnres import error

TOKENS = 33


def rounding_to_nearest(convert):
    def converted(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(bits.astype(np.uint32).view(np.float32))] = 0x7FC0
        return rounded

    return converted


class Linear(torch.autograd.Function):
    """Products of half-precision matrices summed in fp32; a CPU without such instructions takes minutes for them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return (d.float() @ weight.float()).to(x.dtype), (d.float().T @ x.float()).to(weight.dtype)


def cuda_randn(count: int, seed: int, call: int) -> torch.Tensor:
    """torch.randn on a GPU by a generator with this seed, its call number `call`, for up to 270 thousand elements."""
    mask, shift, zeros = np.uint64(0xFFFFFFFF), np.uint64(32), np.zeros(count, np.uint64)
    c = [zeros + np.uint64(call), zeros, np.arange(count, dtype=np.uint64), zeros]
    k = [seed, 0]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> shift) ^ c[1] ^ np.uint64(k[0]),
            b & mask,
            (a >> shift) ^ c[3] ^ np.uint64(k[1]),
            a & mask,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    unit, turn = np.float32(2.0**-32), np.float32(2.0**-32 * 2 * np.pi)
    u = (c[0].astype(np.float32) * unit + unit / 2).astype(np.float64)
    v = (c[1].astype(np.float32) * turn + turn / 2).astype(np.float64)
    return torch.from_numpy((np.sin(v) * np.sqrt(-2 * np.log(u))).astype(np.float32))


def case(spec: str, dim: int, dtype: torch.dtype) -> list[tuple[float, float, float, str]]:
    results, names = {}, []
    x, seed = (cuda_randn(TOKENS * dim, 1, call).view(TOKENS, dim).to(dtype) for call in range(2))
    for name, wide in (("truth", torch.float64), ("pytorch", dtype), ("headwater", dtype)):
        kind = (
            Stack(spec, dim, 8)
            if name == "headwater"
            else ReadEverySublayer(spec, dim, 8, reference_read)
        )
        fill(kind)
        stack = kind.to(dtype).to(wide)
        leaf = x.to(wide, copy=True).requires_grad_()
        out = stack(leaf)
        out.backward(seed.to(wide))
        trained = [(n, p.grad) for n, p in stack.named_parameters() if p.grad is not None]
        results[name] = [out.detach(), leaf.grad, *(gradient for _, gradient in trained)]
        names = ["output", "input", *(n for n, _ in trained)]
    rows = zip(results["headwater"], results["pytorch"], results["truth"], names, strict=True)
    errors = [(error(ours, truth), error(plain, truth), name) for ours, plain, truth, name in rows]
    return sorted(
        ((ours / (2 * plain + 1e-5), ours, plain, name) for ours, plain, name in errors),
        reverse=True,
    )


def main() -> None:
    interpreter._convert_float = rounding_to_nearest(interpreter._convert_float)
    plain = F.linear
    half = (torch.bfloat16, torch.float16)
    F.linear = lambda x, weight, bias=None: (
        Linear.apply(x, weight) if x.dtype in half else plain(x, weight, bias)
    )
    spec, widths, dtypes = sys.argv[1:]
    spec += ("," if ":" in spec else ":") + "backend=triton"
    for dim in map(int, widths.split(",")):
        for dtype in dtypes.split(","):
            worst = [
                f"{r:.3f} ({o:.2e}, {p:.2e}) {name}"
                for r, o, p, name in case(spec, dim, getattr(torch, dtype))
            ]
            print(dim, dtype, *worst[:4], sep="  ", flush=True)


if __name__ == "__main__":
    main()
