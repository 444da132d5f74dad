"""Compare a converted model with the one it came from, on a batch."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.hf.convert.install import find_conversion
from headwater.hf.formats.decoder import DecoderForCausalLM
from headwater.hf.same_function import (
    ONE_PASS,
    divergence,
    is_half,
    one_pass,
    pad_left,
    results_by_kind,
)

KL_LIMIT = 1e-6  # nats per token, fp32
HALF_LIMIT = 2.0  # in half precision: times the plain model's own distance from its fp32 forward
FROM_FP32 = (
    "  differences are from the plain model's forward in fp32: in half precision rounding alone is off from that, and\n"
    f"  the limit is {HALF_LIMIT:g} times what the plain model itself is off by, or {KL_LIMIT:g}"
)


@dataclass(frozen=True)
class Distance:
    """The distance of a model from the reference's logits in fp32, over tokens that are not padding."""

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
        beside = f"median {self.kl_median:.2e}" if self.half else f"worst {self.kl_worst:.2e}"
        return (
            f"KL {self.kl:.2e} nats per token ({beside}, limit {self.limit:.1e}), largest logit difference "
            f"{self.logit_difference:.2e} over {self.tokens} tokens"
        )


@dataclass(frozen=True)
class Verification:
    """The distance of a whole batch in one pass, and of its kinds of token.

    `decoding` has the kinds of the same batch with padding in every other row and its last tokens
    decoded from a cache. It is empty where there is no cache: a head without logits per token, a
    residual that looks back along the tokens, or headwater's own decoder.
    """

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
        subject = "not converted"
        if self.residual is not None:
            subject = f"residual '{self.residual}' at {len(self.sites)} sites"
        lines = [f"{verdict}: {self.whole}; {subject}"]
        lines += [f"  {name}: {distance}" for name, distance in self.decoding.items()]
        if not self.decoding:
            lines.append("  decoding from a cache: not tried")
        if self.whole.half:
            lines.append(FROM_FP32)
        return "\n".join(lines)


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
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    conversion, _ = find_conversion(model) or (None, None)
    # Decoding is compared where both models can decode from a cache.
    has_cache = "input_ids" in inputs and inputs["input_ids"].shape[1] > 1
    if conversion is not None:
        has_cache &= conversion.depth.residual.token_local
    has_cache &= not any(isinstance(one, DecoderForCausalLM) for one in (model, reference))
    dtype = dtype_of(model)
    logits = _logits_by_kind(model, inputs, has_cache)
    truth = _logits_by_kind(cast(reference, torch.float32), inputs, has_cache)
    rounding: list[Tensor] = []
    # In half precision the plain model's own rounding is the measure.
    if is_half(dtype):
        plain = _logits_by_kind(cast(reference, dtype), inputs, has_cache)
        rounding = [divergence(plain[kind], truth[kind]) for kind in plain]
    kinds = [kind for kind in truth if kind in logits]
    distances = {kind: _distance(logits[kind], truth[kind], rounding) for kind in kinds}
    return Verification(
        whole=distances.pop(ONE_PASS),
        decoding=distances,
        residual=None if conversion is None else conversion.report.residual,
        sites=() if conversion is None else conversion.report.sites,
    )


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
    # Only what a checkpoint holds: buffers such as rotary frequencies stay as they are.
    copied = copy.deepcopy(model)
    for tensor in copied.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return copied


def _logits_by_kind(
    model: nn.Module, inputs: Mapping[str, Any], has_cache: bool
) -> dict[str, Tensor]:
    """Logits by kind of token, (tokens, V), in fp64 on the CPU; ONE_PASS are those of the whole batch."""
    device = next(model.parameters()).device
    # Offloaded: a hook takes it from there.
    device = torch.device("cpu") if device.type == "meta" else device
    moved = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
    logits = one_pass(model, moved)
    mask = moved.get("attention_mask")
    # What is padding has no right answer.
    if mask is not None and mask.shape == logits.shape[:2]:
        logits = logits[mask.bool()]
    by_kind: dict[str, Tensor] = {}
    # Labels would ask for a loss of every piece.
    if has_cache:
        moved.pop("labels", None)
        by_kind = results_by_kind(model, pad_left(moved))
    by_kind[ONE_PASS] = logits
    rows: dict[str, Tensor] = {}
    for kind, results in by_kind.items():
        if results.numel():
            rows[kind] = results.double().cpu().flatten(0, -2)
    return rows


def _distance(logits: Tensor, truth: Tensor, rounding: list[Tensor]) -> Distance:
    """`rounding`: how far the plain model in half precision is from fp32, by kind; empty in fp32."""
    if logits.shape != truth.shape:
        shapes = f"logits {tuple(logits.shape)} and {tuple(truth.shape)}"
        raise UserError(f"the models do not compare: {shapes}")
    kl = divergence(logits, truth)
    # Without rounding to compare with, the limit is a number.
    limit = KL_LIMIT
    if rounding:
        limit = max(KL_LIMIT, HALF_LIMIT * _typical(rounding, len(kl)))
    return Distance(
        kl=float(kl.mean()),
        kl_median=float(kl.median()),
        kl_worst=float(kl.max()),
        logit_difference=float((logits - truth).abs().max()),
        tokens=len(kl),
        limit=limit,
        half=bool(rounding),
    )


def _typical(rounding: list[Tensor], tokens: int) -> float:
    """The median of the kind that is farthest; or of that many tokens, if they are few, what their median may be by
    chance: 1.6 standard errors of its rank up. Of 8 tokens a median twice the true one is nothing rare."""
    # Few tokens have a median that varies.
    rank = min(1.0, 0.5 + 0.8 * tokens**-0.5)
    medians = [float(kl.median()) for kl in rounding]
    return max(float(torch.cat(rounding).quantile(rank)), *medians)
