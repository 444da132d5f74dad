"""A small random batch through a model before and after its conversion: a report claims what was measured here.

It is decoded from a cache in part, and every other row is padded. What is compared are the hidden states after the
final norm, token by token: |converted - plain| / |plain|. Then the added parameters are moved off their start for a
moment: what is decoded from the cache must still be what one pass gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.errors import UserError
from headwater.evaluation import evaluating
from headwater.residuals import Residual

from .check import decoded, pad_left, parts_of, whole
from .devices import execution_device, hooked
from .find import Found

ROWS, TOKENS, STEPS = 4, 10, 2
STIR = 0.1  # standard deviation of what is added to the parameters of the residual
# How far off hidden states may be: a layout that does not fit gives 0.3 and more. Rounding gives about eps times the
# root of the number of sublayers (bf16, 8 of them, every architecture of the table: 0.013 at most; fp32: 8e-7).
LEAST, MOST = 1e-3, 0.25
# What a layout that does not fit may raise in the middle of somebody else's code.
ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    AssertionError,
    UnboundLocalError,
)


@dataclass(frozen=True)
class Trial:
    """Hidden states of the tokens that are not padding, by kind of token, each (tokens, D); and how far those decoded
    from a cache are from those of one pass, relative, the worst token (the median in half precision)."""

    parts: dict[str, Tensor]
    gap: float

    @property
    def tokens(self) -> int:
        return sum(len(hidden) for hidden in self.parts.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype


class NotTried(Exception):
    """The reason why a model cannot be run here, which is no fault of a conversion."""


def try_plain(found: Found) -> Trial:
    """Before anything is changed. Raises NotTried."""
    reason = _unrunnable(found)
    if reason:
        raise NotTried(reason)
    try:
        trial = _run(found, with_gap=True)
    except ERRORS as error:
        raise NotTried(
            f"as it is, it does not run on tokens alone ({type(error).__name__}: {error})"
        ) from None
    if any(hidden.is_meta for hidden in trial.parts.values()):
        raise NotTried("it is on the meta device")
    return trial


def difference(found: Found, plain: Trial) -> float:
    """The distance of the converted model from the plain one. Raises UserError if it fails, or is another function."""
    converted = _run_converted(found, with_gap=False)
    limit = _limit(found, plain.dtype)
    worst = 0.0
    for kind, before in plain.parts.items():
        after = converted.parts.get(kind)
        if after is None or after.shape != before.shape:
            raise UserError(f"{_what(found)}gives nothing to compare for tokens {kind}")
        off = _distance(after, before)
        if not off <= limit:  # NaN is refused too
            raise UserError(
                f"{_what(found)}computes something else: hidden states of tokens {kind} are off by {off:.2g}, relative"
            )
        worst = max(worst, off)
    return worst


def check_off_start(found: Found, plain: Trial, residual: Residual) -> None:
    """With the residual's parameters off their start. Raises UserError if a token from the cache is another."""
    if plain.gap > 0.1 * _limit(found, plain.dtype):
        return  # neither does the plain model give the same in one pass: a sparse indexer, a scan that sees padding
    with _stirred(residual):
        gap = _run_converted(found, with_gap=True).gap
    if not gap <= _limit(found, plain.dtype):
        raise UserError(
            f"{_what(found)}decodes from a cache what one pass does not give, once the residual '{residual.spec}' is "
            f"trained: hidden states are off by {gap:.2g}, relative"
        )


def _what(found: Found) -> str:
    return f"the layout of '{found.model_type}' does not fit {type(found.layers[0]).__name__}: converted, it "


def _limit(found: Found, dtype: torch.dtype) -> float:
    return min(MOST, max(LEAST, 2.5 * torch.finfo(dtype).eps * (2 * len(found.layers) + 1) ** 0.5))


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative distance of (tokens, D) from (tokens, D): the worst token, in half precision the median, since there a
    token may go to another expert."""
    sizes = (
        other.double().norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    )  # zeros, as padding's, equal zeros
    distances = (one.double() - other.double()).norm(dim=-1) / sizes
    return float(
        distances.median() if other.dtype.itemsize < torch.float32.itemsize else distances.max()
    )


@contextmanager
def _stirred(residual: Residual) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    before = {name: parameter.detach().clone() for name, parameter in residual.named_parameters()}
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(
                STIR * torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
            )
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in residual.named_parameters():
                parameter.copy_(before[name])


def _unrunnable(found: Found) -> str | None:
    if _divided(found):
        return "its parameters are divided among ranks"
    for module in found.body.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta and not hooked(module):
                return "it is on the meta device"
    return None


def _divided(found: Found) -> bool:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import (
        DTensor,
    )  # which takes a second to import, and is of no use to one process

    return any(
        isinstance(parameter, DTensor) or parameter.numel() == 0
        for parameter in found.body.parameters()
    )


def _run_converted(found: Found, with_gap: bool) -> Trial:
    try:
        return _run(found, with_gap)
    except ERRORS as error:
        raise UserError(f"{_what(found)}fails with {type(error).__name__}: {error}") from error


def _run(found: Found, with_gap: bool) -> Trial:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, found.body.config.vocab_size, (ROWS, TOKENS), generator=generator, device="cpu"
    )
    device = execution_device(found.body.get_input_embeddings(), ids.device)
    inputs = pad_left({"input_ids": ids.to("cpu" if device.type == "meta" else device)})
    mask = inputs["attention_mask"]
    with evaluating(found.body), torch.no_grad():
        hidden = decoded(found.body, inputs, STEPS)
        at_once = whole(found.body, inputs) if hidden is None or with_gap else hidden
    if hidden is None:
        return Trial({"in one pass": at_once[mask.bool()].cpu()}, 0.0)
    kinds = parts_of(mask, STEPS)
    late = kinds["from the cache"] | kinds["from the cache, rows with padding"]
    parts = {kind: hidden[kept].cpu() for kind, kept in kinds.items()}
    return Trial(parts, _distance(hidden[late], at_once[late]) if not hidden.is_meta else 0.0)
