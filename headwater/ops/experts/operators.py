"""One linear layer for each expert, over rows that are sorted by expert.

    y[i] = weight[e] x[i]     for the rows i of expert e, which end at ends[e]

No row is dropped and none is added: an expert may have all of them, or none. On a GPU in bf16 it is torch's grouped
product, for which the host need not know how many rows an expert has; in other dtypes a few rows without gradients, as
decoding has them, each take a copy of their expert's matrix, for the same reason; else it is a product for each expert.
One node for autograd, fake tensors and torch.compile, whatever the loads are.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.triton.registration import operator

ExpertsBackend = Literal["auto", "loop", "grouped", "copied"]
FEW = 64  # rows whose matrices may be copied


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, *, rest: bool = False, backend: ExpertsBackend = "auto"
) -> Tensor:
    """Rows through the matrix of their expert.

    Arguments:
        x: rows sorted by expert, (N, D).
        weight: one matrix an expert, (E, F, D), in the dtype of x.
        ends: where each expert's rows end, (E,) int32, rising to N.
        rest: there may be rows behind the last end, which belong to nobody here and give zeros.
        backend: "loop", a product an expert; "grouped", torch's grouped product; "copied", a copy of its matrix for
            each row, and a loop for gradients; "auto", on a GPU the second in bf16, and the third for few rows.

    Returns: (N, F) in the dtype of x.

    Raises: ValueError for shapes, dtypes or a backend that do not fit.

        y = grouped_linear(torch.randn(5, 8), torch.randn(2, 4, 8), torch.tensor([3, 5], dtype=torch.int32))
    """
    if (
        x.dim() != 2
        or weight.dim() != 3
        or x.shape[1] != weight.shape[2]
        or ends.shape != weight.shape[:1]
    ):
        raise ValueError(
            f"grouped_linear takes rows (N, D), weights (E, F, D) and ends (E,), got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(ends.shape)}"
        )
    if x.dtype != weight.dtype or ends.dtype != torch.int32:
        raise ValueError(
            f"grouped_linear: dtypes {x.dtype} and {weight.dtype} must agree, and ends be int32"
        )
    if backend not in ("auto", "loop", "grouped", "copied"):
        raise ValueError(f"backend must be 'auto', 'loop', 'grouped' or 'copied', got '{backend}'")
    return _GroupedLinear.apply(
        x, weight, ends, rest, _fastest(x, weight) if backend == "auto" else backend
    )


def _fastest(x: Tensor, weight: Tensor) -> str:
    aligned = all(
        size * x.element_size() % 16 == 0 for size in weight.shape[1:]
    )  # the grouped kernels copy 16 bytes
    if aligned and x.is_cuda and x.dtype == torch.bfloat16:
        return "grouped"
    return "copied" if x.is_cuda and len(x) <= FEW and not torch.is_grad_enabled() else "loop"


def _fake_product(x: Tensor, weight: Tensor, ends: Tensor, rest: bool, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@operator(_fake_product)
def experts_product(x: Tensor, weight: Tensor, ends: Tensor, rest: bool, backend: str) -> Tensor:
    """x (N, D), weight (E, F, D) of any strides to (N, F)."""
    if backend != "loop":
        y = (
            F.grouped_mm(x, weight.mT, offs=ends)
            if backend == "grouped"
            else _by_copies(x, weight, ends)
        )
        return y.where(torch.arange(len(y), device=y.device)[:, None] < ends[-1], 0) if rest else y
    y = (x.new_zeros if rest else x.new_empty)(x.shape[0], weight.shape[1])
    for e, rows in enumerate(spans(ends)):
        torch.mm(x[rows], weight[e].T, out=y[rows])
    return y


def _by_copies(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of nobody take the last expert's."""
    expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True).clamp_max(
        len(weight) - 1
    )
    return torch.bmm(weight[expert], x[:, :, None])[:, :, 0]


def _fake_outer(gradient: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    return x.new_empty(len(ends), gradient.shape[1], x.shape[1])


@operator(_fake_outer)
def experts_outer(gradient: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    """gradient (N, F), x (N, D) to (E, F, D); zeros for an expert without rows."""
    if backend == "grouped":
        return F.grouped_mm(gradient.mT, x, offs=ends)
    out = x.new_empty(len(ends), gradient.shape[1], x.shape[1])
    for e, rows in enumerate(spans(ends)):
        torch.mm(gradient[rows].T, x[rows], out=out[e])
    return out


def spans(ends: Tensor) -> list[slice]:
    """Each expert's rows."""
    stops = ends.tolist()
    return [slice(first, stop) for first, stop in zip([0, *stops], stops)]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, rest: bool, backend: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.rest, ctx.backend = rest, backend if backend == "grouped" else "loop"
        return experts_product(x, weight, ends, rest, backend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if (
            torch.is_grad_enabled()
        ):  # create_graph: what follows would count as a constant, without a word
            raise RuntimeError(
                "grouped_linear has no second derivatives: take its gradients without create_graph"
            )
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_x = (
            experts_product(gradient, weight.mT, ends, ctx.rest, ctx.backend)
            if ctx.needs_input_grad[0]
            else None
        )
        d_weight = (
            experts_outer(gradient, x, ends, ctx.backend) if ctx.needs_input_grad[1] else None
        )
        return d_x, d_weight, None, None, None
