# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Launch kernels by address, with as little of the host's time as can be.

Tables of source addresses are filled here too.
"""

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from headwater._torch import current_device, current_stream

from .tiles import INTERPRETED, ceil_div

# How often each operator ran its kernels: tests see by it which way ran.
launches: Counter[str] = Counter()

CHUNK = 32  # addresses written by one launch
MAX_INT32 = 2**31 - 1


# Addresses are numbers here, of whatever type and wherever they point. An address above 2^31 is
# passed as int64.
@triton.jit(do_not_specialize=[f"a{n}" for n in range(CHUNK)] + ["start"])
def _write_addresses(
    table, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31, start,
):  # fmt: skip
    p = table + start
    tl.store(p + 0, a0)
    tl.store(p + 1, a1)
    tl.store(p + 2, a2)
    tl.store(p + 3, a3)
    tl.store(p + 4, a4)
    tl.store(p + 5, a5)
    tl.store(p + 6, a6)
    tl.store(p + 7, a7)
    tl.store(p + 8, a8)
    tl.store(p + 9, a9)
    tl.store(p + 10, a10)
    tl.store(p + 11, a11)
    tl.store(p + 12, a12)
    tl.store(p + 13, a13)
    tl.store(p + 14, a14)
    tl.store(p + 15, a15)
    tl.store(p + 16, a16)
    tl.store(p + 17, a17)
    tl.store(p + 18, a18)
    tl.store(p + 19, a19)
    tl.store(p + 20, a20)
    tl.store(p + 21, a21)
    tl.store(p + 22, a22)
    tl.store(p + 23, a23)
    tl.store(p + 24, a24)
    tl.store(p + 25, a25)
    tl.store(p + 26, a26)
    tl.store(p + 27, a27)
    tl.store(p + 28, a28)
    tl.store(p + 29, a29)
    tl.store(p + 30, a30)
    tl.store(p + 31, a31)


# A compiled kernel's own `run`, and what it expects, is a private part of Triton: seen on 3.6, with
# NVIDIA's GPUs. There `kernel[grid]` took 63 us of the host per launch. On other versions, and with
# hooks set, `kernel[grid]` launches all the same.
KNOWN = ("3.6",)


def runs_directly(version: str, hip: str | None) -> bool:
    return hip is None and ".".join(version.split(".")[:2]) in KNOWN


DIRECT = runs_directly(triton.__version__, torch.version.hip)

# Compiled kernels by what they were specialised for. A model has some hundred; more than MOST come
# only of ever new combinations of unaligned addresses. Then all are forgotten, which costs each one
# public launch: to note the order of use, for dropping the oldest, would cost every launch.
MOST = 4096
_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")
_runtime = triton.knobs.runtime
_compiled: dict[tuple, tuple] = {}
_numbers_fixed: dict[int, tuple] = {}


def launch(
    kernel,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
) -> tuple | None:
    """Run kernel[grid](*tensors, *numbers, **constants), but cheaper for the host.

    Triton binds and specialises every argument at every launch. Here the compiled kernel is kept
    under what it has been specialised for, and called by address: types, whether addresses are
    multiples of 16, constants, and those numbers that the kernel does not declare
    `do_not_specialize`. Lengths are declared so: they may vary as they like. The host is what
    bounds an eager forward pass, so this counts microseconds.

    Returns the kernel, if it was kept.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    index = tensors[0].get_device()
    if INTERPRETED:
        launch_that_fits(kernel, grid, tensors, numbers, constants, **options)
        return None
    if index != current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, tensors, numbers, constants, **options)
        return None

    # The key: everything that the kernel is specialised for.
    addresses = addresses_of(tensors)
    name = id(kernel)  # to hash a kernel takes a lock
    _, specialised_numbers = _numbers_fixed.get(name) or _find_fixed(kernel, len(tensors))
    key = (
        name,
        index,
        num_warps,
        num_stages,
        specialised_numbers(numbers),
        *constants.values(),
        *map(_dtype, tensors),
    )
    if math.gcd(16, *addresses) != 16:
        key += tuple(address & 15 == 0 for address in addresses)
    # Larger numbers are passed as int64.
    if numbers and max(numbers) > MAX_INT32:
        key += tuple([number > MAX_INT32 for number in numbers])

    # The first time, Triton compiles and launches.
    cached = _compiled.get(key)
    if cached is None:
        compiled, constants = launch_that_fits(kernel, grid, tensors, numbers, constants, **options)
        rest = [constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        parts = (None, None, None)
        if DIRECT:
            parts = (compiled.run, compiled.function, compiled.packed_metadata)
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = (constants, rest, *parts)
        return None

    fitting, rest, run, function, metadata = cached
    if run is None or _hooked(kernel):
        kernel[grid](*tensors, *numbers, **fitting, num_warps=num_warps)
        return None
    whole_grid = (*grid, *(1,) * (3 - len(grid)))
    stream = current_stream(index)
    run(*whole_grid, stream, function, metadata, None, None, None, *addresses, *numbers, *rest)
    return cached


def _hooked(kernel) -> bool:
    """Return whether someone wants to see launches.

    That is a profiler, by a chain of hooks, or a hook before runs of this kernel.
    """
    before, after = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    if getattr(before, "calls", before) or getattr(after, "calls", after):
        return True
    return bool(kernel.pre_run_hooks)


class Launch:
    """A call of `launch` with all arguments but the tensors: what needs no tensors is done once.

    Operators keep one for each shape they meet, which spares the host a third of a launch.
    """

    def __init__(
        self, kernel, grid, numbers, constants, *, num_warps: int, num_stages: int = 1
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        # Compiled kernels by device and types, for addresses that are multiples of 16.
        self.kept: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor) -> None:
        index = tensors[0].get_device()
        addresses = addresses_of(tensors)
        key = (index, *map(_dtype, tensors))
        aligned = math.gcd(16, *addresses) == 16
        cached = self.kept.get(key)
        if cached is None or not aligned or index != current_device() or _hooked(self.kernel):
            compiled = launch(
                self.kernel, self.grid, tensors, self.numbers, self.constants, **self.options
            )
            if compiled is not None and aligned:
                _, rest, run, function, metadata = compiled
                grid = (*self.grid, *(1,) * (3 - len(self.grid)))
                self.kept[key] = (run, grid, function, metadata, (*self.numbers, *rest))
            return
        run, grid, function, metadata, rest = cached
        run(*grid, current_stream(index), function, metadata, None, None, None, *addresses, *rest)


def _find_fixed(kernel, tensors: int) -> tuple:
    """Return the kernel, and what picks the numbers that it is specialised for.

    The kernel is kept so that no other takes over its id. Its numbers follow its tensors.
    """
    numbers = [param for param in kernel.params[tensors:] if not param.is_constexpr]
    fixed = [i for i, param in enumerate(numbers) if not param.do_not_specialize]
    pick = operator.itemgetter(*fixed) if fixed else lambda _: None
    return _numbers_fixed.setdefault(id(kernel), (kernel, pick))


def launch_that_fits(
    kernel, grid, tensors, numbers, constants, num_warps: int, num_stages: int
) -> tuple[Any, dict]:
    """Compile and run with `num_stages` tiles under way, or fewer if shared memory holds no more.

    A kernel that pipelines a loop of its own takes the number as the constant STAGES.
    """
    name = "STAGES" if "STAGES" in kernel.arg_names else "num_stages"
    for stages in range(num_stages, 0, -1):
        fixed = {"num_stages": 1} | constants | {name: stages}
        try:
            return kernel[grid](*tensors, *numbers, **fixed, num_warps=num_warps), fixed
        except OutOfResources as error:
            shortage = error.with_traceback(None)  # a traceback would keep the tensors alive
    largest = max(tensors, key=Tensor.numel)
    row = f"{tuple(largest.shape)} in {largest.dtype}"
    raise RuntimeError(
        f"{kernel.__name__}: {row} takes {shortage.required} of {shortage.name}, this GPU has "
        f"{shortage.limit}; choose backend='reference'"
    ) from shortage


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return [*map(_address, tensors)]


def address_table(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Put addresses into an int64 tensor on a device.

    Kernels look sources up in it, so that their number is neither capped nor compiled in. The
    addresses ride in a launch's arguments, which a CUDA graph records; a host copy would not be.
    """
    count = len(addresses)
    whole = ceil_div(count, CHUNK) * CHUNK
    table = torch.empty(whole, dtype=torch.int64, device=device)
    padded = [*addresses] + [addresses[0]] * (whole - count)
    for start in range(0, whole, CHUNK):
        numbers = (*padded[start : start + CHUNK], start)
        launch(_write_addresses, (1,), (table,), numbers, {}, num_warps=1)
    return table
