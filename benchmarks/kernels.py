"""Every kernel as an H200 would get it, compiled on a machine without one: registers, stack, shared memory.

    python -m benchmarks.kernels              # nearly two minutes
    python -m benchmarks.kernels merge mix    # those with a part of the name

Training and decoding run on small CPU tensors, with launches left out and noted instead: kernel, types, constants,
warps. Each that is new is then compiled by Triton for compute capability 9.0. What the interpreter lets pass, such as
ranges that are no powers of two, or types that differ between branches, is an error here; numbers are not checked.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import headwater.ops
from headwater.generation.fused_step import fused_step
from headwater.models import Decoder, ModelConfig
from headwater.ops.banks import mix_bank, project_source
from headwater.ops.cross_entropy import linear_cross_entropy
from headwater.ops.decode import exponentials, likeliest, project
from headwater.ops.depth import depth_attention
from headwater.ops.rotary import rotate_joined
from headwater.ops.sinkhorn import sinkhorn
from headwater.ops.swiglu import swiglu
from headwater.ops.triton import launch as launching

from .arms import Stack

TARGET = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}
MAX_SHARED = 227 * 1024  # bytes that a program may have


@dataclass(frozen=True)
class Noted:
    """A launch: what it is compiled from."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    aligned: frozenset[str]
    """Arguments that are known to be multiples of 16."""
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int

    def compiled(self) -> Any:
        types, fixed = dict(self.types), dict(self.constants)
        places = {name: (place,) for place, name in enumerate(self.kernel.arg_names)}
        source = ASTSource(
            self.kernel,
            {name: types.get(name, "constexpr") for name in places},
            {places[name]: value for name, value in fixed.items()},
            {places[name]: [["tt.divisibility", 16]] for name in self.aligned},
        )
        return triton.compile(
            source, target=TARGET, options={"num_warps": self.warps, "num_stages": self.stages}
        )


def without_driver(note: Callable[..., None], run: Callable[..., None] = lambda *_: None) -> None:
    """From here on CPU tensors are taken for a GPU's, and no launch is made: `note` is told of each that would compile
    (kernel, tensors, numbers, constants, num_warps, num_stages), and `run` called for each after it. Triton must have
    been imported without its interpreter."""
    for module in pkgutil.walk_packages(headwater.ops.__path__, "headwater.ops."):
        # All kernels, before the variable below makes others of them
        importlib.import_module(module.name)

    def launch_that_fits(kernel, grid, tensors, numbers, constants, num_warps, num_stages):  # type: ignore[no-untyped-def]
        pipelined = "STAGES" in kernel.arg_names
        constants = constants | ({"STAGES": num_stages} if pipelined else {})
        note(kernel, tensors, numbers, constants, num_warps, 1 if pipelined else num_stages)
        return SimpleNamespace(run=run, function=None, packed_metadata=None), constants

    os.environ["TRITON_INTERPRET"] = "1"  # what routing asks
    launching.DIRECT, launching.launch_that_fits = True, launch_that_fits
    launching.current_device, launching.current_stream = lambda: -1, lambda index: 0


def type_of(argument: Tensor | float) -> str:
    if isinstance(argument, Tensor):
        return f"*{TYPES[argument.dtype]}"
    return (
        "fp32"
        if isinstance(argument, float)
        else "i64"
        if argument > launching.MAX_INT32
        else "i32"
    )


def _sixteenfold(argument: Tensor | float) -> bool:
    """Return whether Triton finds a multiple of 16; all tensors here begin at one."""
    return isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0)


def train(spec: str, dim: int, dtype: torch.dtype) -> None:
    stack = Stack(f"{spec},backend=triton", dim, 8).to(dtype)
    # Of no interest here, and products in bfloat16 take some CPUs long
    stack.linears = stack.norms[:-1]
    stack(torch.randn(4, dim, dtype=dtype)).sum().backward()


def sum_bank(ways: int, dim: int, dtype: torch.dtype, *tokens: int) -> None:
    bank = [torch.randn(4, dim, dtype=dtype, requires_grad=True) for _ in range(5)]
    down = torch.randn(48, dim)
    for _ in range(2):  # of which the first adds to what the second gathered
        z, newest = project_source(bank[-1], down, backend="triton")
        weights = torch.randn(*tokens, ways, 5) + (z.mean() if tokens else 0)
        outs, (_, *bank) = mix_bank([*bank[:-1], newest], weights, backend="triton")
        bank.append(torch.stack(outs).sum(0))
    bank[-1].sum().backward()


def lose(vocabulary: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(rows, 64, dtype=dtype, requires_grad=True) for rows in (4, vocabulary))
    linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.long), backend="triton").backward()


def balance(streams: int) -> None:
    sinkhorn(
        torch.randn(4, streams, streams, requires_grad=True), 20, backend="triton"
    ).sum().backward()


def gate(width: int, dtype: torch.dtype) -> None:
    swiglu(
        torch.randn(4, 2 * width, dtype=dtype, requires_grad=True), backend="triton"
    ).sum().backward()


def turn(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    joined = torch.randn(2, 4, (heads + 2 * kv_heads) * head_dim, dtype=dtype, requires_grad=True)
    tables = torch.randn(4, head_dim // 2), torch.randn(4, head_dim // 2)
    sum(
        part.sum() for part in rotate_joined(joined, tables, heads, kv_heads, backend="triton")
    ).backward()  # type: ignore[union-attr]


@torch.no_grad()
def decode(spec: str, rows: int, dtype: torch.dtype) -> None:
    shape = {"dim": 256, "layers": 3, "heads": 4, "kv_heads": 2, "mlp_dim": 704, "qk_norm": True}
    model = (
        Decoder(ModelConfig(vocab_size=512, context=256, residual=spec, **shape)).to(dtype).eval()
    )  # type: ignore[arg-type]
    cache = model.new_cache(rows, 200)
    model.hidden(torch.zeros(rows, 3, dtype=torch.long), cache)
    cache.lengths.even = None
    step = fused_step(model, cache, backend="triton")
    assert step is not None
    step(torch.zeros(rows, dtype=torch.long))


def run_everything() -> None:
    for dim, dtype in ((512, torch.bfloat16), (123, torch.float32)):
        train("attnres-block:block=3", dim, dtype)
    train("attnres-full:window=8", 512, torch.bfloat16)
    for spec, dim, dtype in (
        ("mhc:streams=4", 512, torch.bfloat16),
        ("mhc:streams=8", 384, torch.bfloat16),
        ("hyper-connections:streams=3", 123, torch.float32),
    ):
        train(spec, dim, dtype)
    for ways, dim, dtype in (
        (4, 256, torch.bfloat16),
        (4, 1024, torch.bfloat16),
        (3, 123, torch.float32),
    ):
        sum_bank(ways, dim, dtype, 4)
    sum_bank(1, 512, torch.bfloat16)
    lose(1000, torch.bfloat16)
    balance(4)
    for width, dtype in (
        (344, torch.bfloat16),
        (1024, torch.bfloat16),
        (1024, torch.float32),
        (123, torch.float32),
    ):
        gate(width, dtype)
    for head_dim, dtype in (
        (64, torch.bfloat16),
        (96, torch.bfloat16),
        (128, torch.bfloat16),
        (64, torch.float32),
    ):
        turn(6, 6 if head_dim == 64 else 2, head_dim, dtype)
    for rows in (1, 3, 40):
        decode("attnres-block:block=3", rows, torch.bfloat16)
    likeliest(torch.randn(2, 1000), backend="triton")
    exponentials(
        torch.zeros(2, dtype=torch.long), torch.zeros(1, dtype=torch.long), 1000, backend="triton"
    )
    rows, weights = torch.randn(300, 256), [torch.randn(512, 256) for _ in range(2)]
    project(rows, weights, gated=True, backend="triton")  # so many that the library multiplies
    with torch.no_grad():
        depth_attention([rows[:4]] * 5, rows[0], backend="triton")


def launches_of(run: Callable[[], None]) -> list[Noted]:
    compilations: dict[Noted, None] = {}

    def note(
        kernel: Any, tensors: Any, numbers: Any, constants: dict[str, Any], warps: int, stages: int
    ) -> None:
        arguments = {param.name: value for param, value in zip(kernel.params, (*tensors, *numbers))}
        free = {param.name for param in kernel.params if param.do_not_specialize}
        aligned = {
            name for name, value in arguments.items() if _sixteenfold(value) and name not in free
        }
        types = tuple((name, type_of(value)) for name, value in arguments.items())
        compilations[
            Noted(kernel, types, frozenset(aligned), tuple(constants.items()), warps, stages)
        ] = None

    without_driver(note)
    run()
    return [*compilations]


def resources(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", listing.stdout)
    assert numbers is not None, listing.stdout
    return {
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "shared": compiled.metadata.shared,
    }


def main() -> None:
    failed = 0
    for noted in launches_of(run_everything):
        name = noted.kernel.__name__
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        try:
            usage = resources(noted.compiled())
        except Exception as error:  # whatever of Triton's or its assembler's
            failed += 1
            print(
                f"{name}: {str(error).strip().splitlines()[-1]} ({dict(noted.constants)})",
                flush=True,
            )
            continue
        failed += usage["shared"] > MAX_SHARED
        words = ", ".join(f"{key} {value}" for key, value in usage.items())
        print(f"{name}: {noted.warps} warps, {words}", flush=True)
    if failed:
        raise SystemExit(f"{failed} kernels would not run on an H200")


if __name__ == "__main__":
    main()
