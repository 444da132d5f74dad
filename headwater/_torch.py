"""Everything that headwater takes from PyTorch's private parts, and what stands in where a release
lacks one.

Each name below says why the public way is not enough. All have been seen on torch 2.10, 2.11, 2.13
and 2.15;
`tests/test_torch_private.py` compares each with its public way, and hides it to see that the rest
    still works.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:  # kernels import this file, and do without seconds of torch.distributed
    from torch.distributed.tensor import DTensor


def find(path: str) -> Any:
    """Return what a dotted path names, or None in a release that lacks it."""
    owner, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(owner), name)
    except (ImportError, AttributeError):
        return None


# Autograd. `Function.apply` looks for leftovers of functorch in every argument, in Python: as long
# as a launch takes.

_transforms_active = find("torch._C._are_functorch_transforms_active")


def transformed() -> bool:
    """Return whether a transform of torch.func is active, such as grad or vmap. Else: unknown;
    `apply` refuses them."""
    return (
        _transforms_active is not None
        and not torch.compiler.is_compiling()
        and _transforms_active()
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args), without that search where no functorch transform is active. Else: as
    it is."""
    if _transforms_active is None or torch.compiler.is_compiling() or _transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


# To add to a gradient in place one must be alone with it, and autograd gives one to several: to the
# terms of a sum, to the caller of `autograd.grad`. Nothing public counts them. Else: assume that
# another has it.

_use_count: Any = getattr(Tensor, "_use_count", None)


def alone(gradient: Tensor) -> bool:
    """Return whether a backward is the only one that has this gradient, which another backward
    returned.

    A reference that Python keeps, such as a hook's, is not counted.
    """
    return _use_count is not None and _use_count(gradient) <= _least_uses()


class _Counted(torch.autograd.Function):
    counts: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Counted.counts.append(_use_count(gradient))
        return gradient.clone()


@functools.cache
def _least_uses() -> int:
    """The count of a gradient that a backward has alone: what the engine itself holds differs
    between releases."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        torch.autograd.grad(_Counted.apply(_Counted.apply(x)), x)
    return _Counted.counts[-1]


# Hooks. Nothing public says whether a call of a module runs more than its forward. Else: only its
# own are known.

_hooks_of_all: Callable[[], Any] = find("torch.nn.modules.module._has_any_global_hook") or (
    lambda: False
)


def hooked(module: torch.nn.Module) -> bool:
    """Return whether a module, or all modules, have a hook: then the module must be called."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks or _hooks_of_all())


# Dispatch. Nothing public says whether fake tensors or another mode are listening. Else: assume
# that one is.

_dispatch_mode = find("torch.utils._python_dispatch._get_current_dispatch_mode")


def traced() -> bool:
    """Return whether something may want to see operators instead of what they run: torch.compile, a
    dispatch mode."""
    return _dispatch_mode is None or torch.compiler.is_compiling() or _dispatch_mode() is not None


class _FunctionMode(TorchFunctionMode):
    """Stands in for a dispatch mode: sees calls of PyTorch's functions, of which some are several
    operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A shape or a device is no result of an operator.
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result
        return self.__torch_dispatch__(lambda *_, **__: result, types, args, kwargs)  # type: ignore[attr-defined]


# A class to derive from, which sees every operator; PyTorch's documentation names it by this
# private path.
TorchDispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode") or _FunctionMode


def tree_leaves(tree: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists and dicts hold. PyTorch's own function for that is
    private."""
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from tree_leaves(branch)
    elif isinstance(tree, dict):
        yield from tree_leaves(list(tree.values()))
    else:
        yield tree


# Tensors without data. The meta device is public, and autocast does not know it: dtypes would come
# out wrong.


def without_data() -> AbstractContextManager[Any]:
    """Inside, operators compute shapes and dtypes, and allocate nothing. Else: they compute, which
    costs memory."""
    mode = find("torch._subclasses.fake_tensor.FakeTensorMode")
    return nullcontext() if mode is None else mode()


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, of fake tensors too (which have no address),
    while it is alive."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


# Many tensors at once. One launch for all of a dtype. Else: one for each.

_foreach_mul_ = find("torch._foreach_mul_")
_foreach_norm = find("torch._foreach_norm")


def scale_all_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all in place."""
    if _foreach_mul_ is None:
        for tensor in tensors:
            tensor.mul_(factor)
    elif tensors:
        _foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each, a tensor without axes."""
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return list(_foreach_norm(list(tensors)))


# The device that kernels are launched on: asked before every launch, where the public ways take
# microseconds.

current_device: Callable[[], int] = find("torch._C._cuda_getDevice") or torch.cuda.current_device


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream: Callable[[int], int] = find("torch._C._cuda_getCurrentRawStream") or _public_stream
"""The address of the current stream of a device."""


# Collectives that torch.compile keeps in its graph, in an autograd function's backward too: they go
# by a group's name.

_functional: Any = (
    torch.ops._c10d_functional if hasattr(torch.ops._c10d_functional, "wait_tensor") else None
)
_groups: dict[str, dist.ProcessGroup] = {}


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name that a group has in the collectives below."""
    _groups[group.group_name] = group
    return group.group_name


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """(n, ...) of each of `size` ranks to (size * n, ...)."""
    if _functional is not None:
        return _functional.wait_tensor(_functional.all_gather_into_tensor(x, size, group))
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=_groups[group])
    return out


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """(size * n, ...) of each of `size` ranks to this rank's (n, ...) of their sum."""
    if _functional is not None:
        return _functional.wait_tensor(_functional.reduce_scatter_tensor(x, "sum", size, group))
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=_groups[group])
    return out


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks, in a tensor of its own."""
    if _functional is not None:
        return _functional.wait_tensor(_functional.all_reduce(x, "sum", group))
    out = x.clone()
    dist.all_reduce(out, group=_groups[group])
    return out


# Divided tensors. DTensor does not say where its part lies. Else: worked out for plain shards, as
# `torch.chunk` cuts.


def local_rectangle(whole: DTensor) -> tuple[slice, ...]:
    """Return the part of a divided tensor that this rank has."""
    shape_and_offset = find("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
    if shape_and_offset is None:
        return _cut_in_order(whole)
    shape, offset = shape_and_offset(whole.shape, whole.device_mesh, whole.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape))


def _cut_in_order(whole: DTensor) -> tuple[slice, ...]:
    from torch.distributed.tensor import Replicate, Shard

    bounds = [(0, size) for size in whole.shape]
    coordinate = cast(list[int], whole.device_mesh.get_coordinate())
    for placement, ranks, rank in zip(whole.placements, whole.device_mesh.shape, coordinate):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise NotImplementedError(
                f"with torch {torch.__version__} a rank's part is known of Shard and Replicate only, "
                f"not of {type(placement).__name__}: use torch 2.10 to 2.15"
            )
        first, stop = bounds[placement.dim]
        step = math.ceil((stop - first) / ranks)
        bounds[placement.dim] = min(stop, first + rank * step), min(stop, first + (rank + 1) * step)
    return tuple(slice(*bound) for bound in bounds)


# The compiler gives up on a function after eight versions, and blocks of all depths share one. Else:
# it gives up.


def allow_recompiles(count: int) -> None:
    """Let torch.compile make at least `count` versions of a function."""
    config = find("torch._dynamo.config")
    if config is not None and hasattr(config, "recompile_limit"):
        config.recompile_limit = max(config.recompile_limit, count)


# Muon's iteration, for one matrix that is not a parameter. Else: an optimizer for that matrix
# alone.


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return the update that torch.optim.Muon makes of a momentum (m, n), in bf16."""
    iterate = find("torch.optim._muon._zeropower_via_newtonschulz")
    if iterate is not None:
        return iterate(matrix, coefficients, steps, eps)
    # Whose rate is not adjusted
    wide = matrix.bfloat16().T if matrix.shape[0] > matrix.shape[1] else matrix.bfloat16()
    weight = torch.nn.Parameter(torch.zeros_like(wide))
    weight.grad = wide
    options: dict[str, Any] = {"ns_coefficients": coefficients, "ns_steps": steps, "eps": eps}
    torch.optim.Muon(
        [weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options
    ).step()
    update = weight.detach().neg_()
    return update.T if matrix.shape[0] > matrix.shape[1] else update


def adjusted_rate(rate: float, kind: str | None, shape: Sequence[int]) -> float:
    """Muon's learning rate for a matrix of a shape, by the formulas of torch.optim.Muon's
    documentation."""
    rows, columns = shape[:2]
    if kind is None or kind == "original":
        return rate * math.sqrt(max(1, rows / columns))
    return rate * (0.2 * math.sqrt(max(rows, columns)))


# Steps that the host does not judge. It is how torch.amp.GradScaler speaks to fused optimizers;
# there is no other way.


def skip_where(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Let each later step of a fused optimizer change nothing while `bad`, a float on its device,
    is one."""
    optimizer.found_inf = bad  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
