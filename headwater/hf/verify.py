"""Compare a converted model with the one it came from, on a batch."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.evaluation import evaluating
from headwater.hf.convert.check import decoded, pad_left, parts_of, whole
from headwater.hf.convert.install import Conversion, conversion_of
from headwater.hf.formats.decoder import DecoderForCausalLM

KL_LIMIT = 1e-6  # nats per token, fp32
HALF_LIMIT = 2.0  # in half precision: times the plain model's own distance from its fp32 forward
FROM_FP32 = (
    "  differences are from the plain model's forward in fp32: in half precision rounding alone is off from that, and\n"
    f"  the limit is {HALF_LIMIT:g} times what the plain model itself is off by, or {KL_LIMIT:g}"
)


@dataclass(frozen=True)
class Distance:
    """From the reference's logits in fp32, over tokens that are not padding."""

    kl: float  # nats per token, the mean
    kl_median: float
    kl_worst: float  # of one token
    logit_difference: float  # the largest
    tokens: int
    limit: float  # in fp32 of the mean; in half precision of the median, since one token may go to another expert
    half: bool

    @property
    def equal(self) -> bool:
        return (self.kl_median if self.half else self.kl) <= self.limit

    def __str__(self) -> str:
        judged = f"median {self.kl_median:.2e}" if self.half else f"worst {self.kl_worst:.2e}"
        return (
            f"KL {self.kl:.2e} nats per token ({judged}, limit {self.limit:.1e}), largest logit difference "
            f"{self.logit_difference:.2e} over {self.tokens} tokens"
        )


@dataclass(frozen=True)
class Verification:
    """The batch in one pass; and by kind of token, of the same batch with padding in every other row and its last
    tokens decoded from a cache. `decoding` is empty where there is no cache: a head without logits per token, a
    residual that looks back along the tokens, or headwater's own decoder."""

    whole: Distance
    decoding: dict[str, Distance]
    residual: str | None  # None: the model is not converted
    sites: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return all(distance.equal for distance in (self.whole, *self.decoding.values()))

    @property
    def kl(self) -> float:
        return self.whole.kl

    @property
    def logit_difference(self) -> float:
        return self.whole.logit_difference

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        what = (
            f"residual '{self.residual}' at {len(self.sites)} sites"
            if self.residual
            else "not converted"
        )
        cached = [f"  {name}: {distance}" for name, distance in self.decoding.items()]
        lines = [
            f"{verdict}: {self.whole}; {what}",
            *(cached or ["  decoding from a cache: not tried"]),
        ]
        return "\n".join([*lines, FROM_FP32] if self.whole.half else lines)


def verify(
    model: nn.Module, reference: nn.Module, batch: Tensor | Mapping[str, Any]
) -> Verification:
    """Measure whether a converted model still computes what the plain one does. Neither is changed.

    In fp32 the KL of the reference to the model may be 1e-6 nats per token. In half precision even the plain model is
    farther from its own fp32 forward, so the converted one may be twice as far from that as the plain one is.

    Arguments:
        model: the converted model.
        reference: the model it came from, in the same dtype or in fp32.
        batch: token ids, (B, T), or the keyword arguments of both models with `input_ids`. Logits of tokens that the
            attention mask leaves out do not count.

    Returns: a `Verification`; `.equal` is the verdict, and it prints with its numbers.

    Raises: `headwater.errors.UserError` where the models' logits do not compare, and for a reference in half precision
    that has no fp32 forward here (offloaded, quantised).

        result = headwater.verify(model, plain, tokenizer(text, return_tensors="pt"))
        assert result.equal, str(result)
    """
    for argument in (model, reference):
        if not isinstance(argument, nn.Module):
            raise UserError(
                f"verify takes two loaded models and a batch; got a {type(argument).__name__}"
            )
    if isinstance(batch, str):
        raise UserError(
            "a batch is token ids, and this is a text: give tokenizer(text, return_tensors='pt')"
        )
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    dtype, conversion = dtype_of(model), _conversion(model)
    has_cache = "input_ids" in inputs and (
        conversion is None or conversion.depth.residual.token_local
    )
    has_cache &= not any(isinstance(one, DecoderForCausalLM) for one in (model, reference))
    half = dtype.itemsize < torch.float32.itemsize
    ours = _passes(model, inputs, has_cache)
    plain = _passes(cast(reference, dtype), inputs, has_cache) if half else {}
    truth = _passes(cast(reference, torch.float32), inputs, has_cache)
    rounding = [_kl(plain[name], truth[name]) for name in plain]
    distances = {
        name: _distance(ours[name], truth[name], rounding) for name in truth if name in ours
    }
    return Verification(
        whole=distances.pop("whole"),
        decoding=distances,
        residual=None if conversion is None else conversion.report.residual,
        sites=() if conversion is None else conversion.report.sites,
    )


def _conversion(model: nn.Module) -> Conversion | None:
    try:
        return conversion_of(model)[0]
    except UserError:
        return None


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself if it has the dtype, else a copy: of what a checkpoint holds, not the frequencies of rotary
    embeddings, which transformers keeps in fp32."""
    if dtype_of(model) == dtype:
        return model
    if any(p.is_meta for p in model.parameters()) or getattr(model, "is_quantized", False):
        raise UserError(
            f"half precision is judged against the fp32 forward of the reference, and a {type(model).__name__} that is "
            "offloaded or quantised has none here: load the reference in fp32, without a device map"
        )
    copied = copy.deepcopy(model)
    for tensor in copied.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return copied


def _passes(model: nn.Module, inputs: Mapping[str, Any], has_cache: bool) -> dict[str, Tensor]:
    """Logits by kind of token, (tokens, V), in fp64 on the CPU."""
    device = next(model.parameters()).device
    device = (
        torch.device("cpu") if device.type == "meta" else device
    )  # offloaded: a hook takes it from there
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    with evaluating(model), torch.no_grad():
        logits, mask = whole(model, moved), moved.get("attention_mask")
        logits_by_kind = {
            "whole": logits[mask.bool()]
            if mask is not None and mask.shape == logits.shape[:2]
            else logits
        }
        if has_cache and moved["input_ids"].shape[1] > 1:
            padded = pad_left({name: value for name, value in moved.items() if name != "labels"})
            cached = decoded(model, padded)
            parts = {} if cached is None else parts_of(padded["attention_mask"])
            parts.pop("in one pass", None)  # that is `whole`
            logits_by_kind |= {
                name: cached[kept]
                for name, kept in parts.items()
                if cached is not None and kept.any()
            }
    return {name: logits.double().cpu().flatten(0, -2) for name, logits in logits_by_kind.items()}


def _distance(ours: Tensor, truth: Tensor, rounding: list[Tensor]) -> Distance:
    """`rounding`: how far the plain model in half precision is from fp32, by kind; empty in fp32."""
    if ours.shape != truth.shape:
        raise UserError(
            f"the models do not compare: logits {tuple(ours.shape)} and {tuple(truth.shape)}"
        )
    kl = _kl(ours, truth)
    return Distance(
        kl=float(kl.mean()),
        kl_median=float(kl.median()),
        kl_worst=float(kl.max()),
        logit_difference=float((ours - truth).abs().max()),
        tokens=len(kl),
        limit=max(KL_LIMIT, HALF_LIMIT * _typical(rounding, len(kl))) if rounding else KL_LIMIT,
        half=bool(rounding),
    )


def _typical(rounding: list[Tensor], tokens: int) -> float:
    """The median of the kind that is farthest; or of that many tokens, if they are few, what their median may be by
    chance: 1.6 standard errors of its rank up. Of 8 tokens a median twice the true one is nothing rare."""
    by_chance = torch.cat(rounding).quantile(min(1.0, 0.5 + 0.8 * tokens**-0.5))
    return float(torch.stack([by_chance, *(kl.median() for kl in rounding)]).max())


def _kl(logits: Tensor, truth: Tensor) -> Tensor:
    log_p, log_q = truth.log_softmax(-1), logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
