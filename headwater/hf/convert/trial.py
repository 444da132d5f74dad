"""A small random batch through a model before and after its conversion: a report claims what was measured here.

It is decoded from a cache in part, and every other row is padded. What is compared are the hidden
states after the final norm, token by token. Then the added parameters are moved off their start for a
moment: what is decoded from the cache must still be what one pass gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.errors import UserError
from headwater.hf.same_function import (
    CACHED,
    ONE_PASS,
    is_half,
    kinds_of,
    one_pass,
    pad_left,
    relative_distance,
    results_by_kind,
)
from headwater.residuals import Residual

from .devices import execution_device, hooked
from .find import Parts

ROWS, TOKENS, STEPS = 4, 10, 2
STIR = 0.1  # standard deviation of what is added to the parameters of the residual
# How far off hidden states may be: a layout that does not fit gives 0.3 and more. Rounding gives about eps times the
# root of the number of sublayers (bf16, 8 of them, every architecture of the table: 0.013 at most; fp32: 8e-7).
LEAST, MOST = 1e-3, 0.25
ON_META = "it is on the meta device"
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
    """The hidden states of a batch by kind of token, each (tokens, D), without padding.

    `gap` is how far those decoded from a cache are from those of one pass.
    """

    states: dict[str, Tensor]
    gap: float

    @property
    def tokens(self) -> int:
        return sum(len(hidden) for hidden in self.states.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.states.values())).dtype


class NotTried(Exception):
    """The reason why a model cannot be run here, which is no fault of a conversion."""


def try_plain(parts: Parts) -> Trial:
    """Run the model before anything is changed. Raises NotTried."""
    reason = _unrunnable(parts.body)
    if reason is None:
        try:
            states = _states(parts.body)
            if not any(hidden.is_meta for hidden in states.values()):
                return Trial(states, _gap(parts.body, states))
            reason = ON_META
        except ERRORS as error:
            cause = f"{type(error).__name__}: {error}"
            reason = f"as it is, it does not run on tokens alone ({cause})"
    raise NotTried(reason)


def difference(parts: Parts, plain: Trial) -> float:
    """The distance of the converted model from the plain one. Raises UserError if it fails, or is another function."""
    with _misfits(parts):
        converted = _states(parts.body)
    # Each kind of token has a limit of its own to keep: padding and caches fail alone.
    distances = [0.0]
    for kind, before in plain.states.items():
        distance = _distance(converted.get(kind, torch.empty(0)), before)
        if not distance <= _limit(parts, plain.dtype):  # NaN is refused too
            raise UserError(
                f"{_subject(parts)}computes something else: hidden states of tokens {kind} are off by "
                f"{distance:.2g}, relative"
            )
        distances.append(distance)
    return max(distances)


def check_off_start(parts: Parts, plain: Trial, residual: Residual) -> None:
    """Move the residual's parameters off their start. Raises UserError if a token from the cache is another."""
    if plain.gap > 0.1 * _limit(parts, plain.dtype):
        return  # neither does the plain model give the same in one pass: a sparse indexer, a scan that sees padding
    with _misfits(parts), _stirred(residual):
        gap = _gap(parts.body, _states(parts.body))
    if not gap <= _limit(parts, plain.dtype):
        raise UserError(
            f"{_subject(parts)}decodes from a cache what one pass does not give, once the residual "
            f"'{residual.spec}' is trained: hidden states are off by {gap:.2g}, relative"
        )


@contextmanager
def _misfits(parts: Parts) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{_subject(parts)}fails with {cause}") from error


def _subject(parts: Parts) -> str:
    layer = type(parts.layers[0]).__name__
    return f"the layout of '{parts.model_type}' does not fit {layer}: converted, it "


def _limit(parts: Parts, dtype: torch.dtype) -> float:
    sublayers = 2 * len(parts.layers)
    # Errors of the sublayers add up like a random walk.
    rounding = 2.5 * torch.finfo(dtype).eps * (sublayers + 1) ** 0.5
    return min(MOST, max(LEAST, rounding))


def _distance(states: Tensor, truth: Tensor) -> float:
    """The relative distance of the worst token; in half precision of the median one."""
    distances = relative_distance(states, truth)
    return float(distances.median() if is_half(truth.dtype) else distances.max())


@contextmanager
def _stirred(residual: Residual) -> Iterator[None]:
    # The same noise each time, drawn on the CPU.
    generator = torch.Generator().manual_seed(0)
    before = [(parameter, parameter.detach().clone()) for parameter in residual.parameters()]
    with torch.no_grad():
        for parameter, _ in before:
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.add_(STIR * noise.to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, start in before:
                parameter.copy_(start)


def _unrunnable(body: nn.Module) -> str | None:
    if _is_divided(body):
        return "its parameters are divided among ranks"
    # Offloaded parameters are on meta too, but their hooks bring them back.
    for module in body.modules():
        on_meta = any(parameter.is_meta for parameter in module.parameters(recurse=False))
        if on_meta and not hooked(module):
            return ON_META
    return None


def _is_divided(body: nn.Module) -> bool:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    # It takes a second to import, and is of no use to one process.
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) or p.numel() == 0 for p in body.parameters())


def _batch(body: PreTrainedModel) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    size = (ROWS, TOKENS)
    ids = torch.randint(0, body.config.vocab_size, size, generator=generator, device="cpu")
    # A hook moves the ids of an offloaded model.
    device = execution_device(body.get_input_embeddings(), ids.device)
    return pad_left({"input_ids": ids if device.type == "meta" else ids.to(device)})


def _states(body: PreTrainedModel) -> dict[str, Tensor]:
    inputs = _batch(body)
    states = results_by_kind(body, inputs, STEPS)
    if not states:
        states = {ONE_PASS: one_pass(body, inputs)[inputs["attention_mask"].bool()]}
    return {kind: hidden.cpu() for kind, hidden in states.items()}


def _gap(body: PreTrainedModel, states: dict[str, Tensor]) -> float:
    """The distance of what came from the cache to what one pass gives; 0 without a cache."""
    if len(states) == 1:
        return 0.0
    inputs = _batch(body)
    # The same tokens, without and with a cache.
    kinds, at_once = kinds_of(inputs["attention_mask"], STEPS), one_pass(body, inputs)
    decoded = torch.cat([states[kind] for kind in CACHED])
    return _distance(decoded, torch.cat([at_once[kinds[kind]].cpu() for kind in CACHED]))
