"""One linear layer for each expert, over rows that are sorted by expert.

    y[i] = weight[e] x[i]     for the rows i of expert e, which end at ends[e]

No row is dropped and none is added: an expert may have all of them, or none. There are three ways:

    grouped    torch's grouped product: on a GPU in bf16. The host need not know the loads.
    copied     a few rows without gradients, as in decoding: each row takes a copy of its expert's
               matrix. The host need not know the loads either.
    loop       a product for each expert, everywhere else.

The operator is one node for autograd, fake tensors and torch.compile, whatever the loads are.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.routing import refuse_second_derivative
from headwater.ops.triton.registration import operator

ExpertsBackend = Literal["auto", "loop", "grouped", "copied"]
FEW = 64  # rows whose matrices may be copied


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rest: bool = False,
    backend: ExpertsBackend = "auto",
) -> Tensor:
    """Multiply rows by the matrix of their expert.

    Arguments:
        x: rows sorted by expert, (N, D).
        weight: one matrix per expert, (E, F, D), in the dtype of x.
        ends: where each expert's rows end, (E,) int32, rising to N.
        rest: allow rows behind the last end, which belong to nobody here and give zeros.
        backend: "loop", a product per expert; "grouped", torch's grouped product; "copied", a copy
            of its matrix for each row, and a loop for gradients; "auto", on a GPU "grouped" in
            bf16, and "copied" for few rows.

    Returns: (N, F) in the dtype of x.

    Raises: ValueError for shapes, dtypes or a backend that do not fit.

        ends = torch.tensor([3, 5], dtype=torch.int32)
        y = grouped_linear(torch.randn(5, 8), torch.randn(2, 4, 8), ends)
    """
    experts, _, width = weight.shape
    rows_fit = x.dim() == 2 and x.shape[1] == width
    if (
        not rows_fit
        or ends.shape != (experts,)
        or x.dtype != weight.dtype
        or ends.dtype != torch.int32
    ):
        rows, weights, bounds = (tuple(tensor.shape) for tensor in (x, weight, ends))
        raise ValueError(
            "grouped_linear's rows must be (N, D), weights (E, F, D) of their dtype, and ends be "
            f"int32, (E,); got {rows}, {weights} and {bounds}"
        )
    if backend not in ("auto", "loop", "grouped", "copied"):
        raise ValueError(f"backend must be 'auto', 'loop', 'grouped' or 'copied', got '{backend}'")
    way = _fastest(x, weight) if backend == "auto" else backend
    return _GroupedLinear.apply(x, weight, ends, rest, way)


def _fastest(x: Tensor, weight: Tensor) -> str:
    """Choose a way for these tensors."""
    if not x.is_cuda:
        return "loop"
    # The grouped kernels copy 16 bytes at once.
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and x.dtype == torch.bfloat16:
        return "grouped"
    return "copied" if len(x) <= FEW and not torch.is_grad_enabled() else "loop"


def _fake_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    rest: bool,
    backend: str,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@operator(_fake_product)
def experts_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    rest: bool,
    backend: str,
) -> Tensor:
    """Multiply x (N, D) by weight (E, F, D) of any strides, to (N, F)."""
    if backend == "loop":
        return _by_loop(x, weight, ends, rest)
    if backend == "grouped":
        y = F.grouped_mm(x, weight.mT, offs=ends)
    else:
        y = _by_copies(x, weight, ends)
    if not rest:
        return y
    belongs = torch.arange(len(y), device=y.device) < ends[-1]
    return y.where(belongs[:, None], 0)


def _by_loop(x: Tensor, weight: Tensor, ends: Tensor, rest: bool) -> Tensor:
    shape = (x.shape[0], weight.shape[1])
    y = x.new_zeros(shape) if rest else x.new_empty(shape)
    for e, rows in enumerate(spans(ends)):
        torch.mm(x[rows], weight[e].T, out=y[rows])
    return y


def _by_copies(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its own copy of a matrix; rows of nobody take the last expert's."""
    row = torch.arange(len(x), device=x.device)
    expert = torch.searchsorted(ends, row, right=True).clamp_max(len(weight) - 1)
    columns = x.unsqueeze(-1)
    return torch.bmm(weight[expert], columns).squeeze(-1)


def _fake_outer(gradient: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    return x.new_empty(len(ends), gradient.shape[1], x.shape[1])


@operator(_fake_outer)
def experts_outer(gradient: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    """Sum outer products of gradient (N, F) and x (N, D) per expert, to (E, F, D).

    An expert without rows gets zeros.
    """
    if backend == "grouped":
        return F.grouped_mm(gradient.mT, x, offs=ends)
    out = x.new_empty(len(ends), gradient.shape[1], x.shape[1])
    for e, rows in enumerate(spans(ends)):
        torch.mm(gradient[rows].T, x[rows], out=out[e])
    return out


def spans(ends: Tensor) -> list[slice]:
    """Return each expert's rows."""
    stops = ends.tolist()
    starts = [0, *stops]
    return [slice(start, stop) for start, stop in zip(starts, stops)]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, rest: bool, backend: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.rest = rest
        ctx.backend = backend if backend == "grouped" else "loop"
        return experts_product(x, weight, ends, rest, backend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative("grouped_linear")
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if needs_x:
            dx = experts_product(gradient, weight.mT, ends, ctx.rest, ctx.backend)
        if needs_weight:
            dweight = experts_outer(gradient, x, ends, ctx.backend)
        return dx, dweight, None, None, None
