"""Compare a converted model with the one it came from, on a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.hf.convert.install import conversion_of

KL_LIMIT = 1e-6  # nats per token, fp32


@dataclass(frozen=True)
class Verification:
    """KL of the reference to the model in nats per token, in fp64, over the tokens that are not padding."""

    kl: float
    kl_worst: float  # of one token
    logit_difference: float  # the largest
    tokens: int
    residual: str | None  # None: the model is not converted
    sites: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.kl <= KL_LIMIT

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        what = f"residual '{self.residual}' at {len(self.sites)} sites" if self.residual else "not converted"
        return (
            f"{verdict}: KL {self.kl:.2e} nats per token (worst {self.kl_worst:.2e}), largest logit difference "
            f"{self.logit_difference:.2e} over {self.tokens} tokens; {what}"
        )


def verify(model: nn.Module, reference: nn.Module, batch: Tensor | Mapping[str, Any]) -> Verification:
    """`batch` is token ids, (B, T), or the keyword arguments of both models. Neither model is changed."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    ours, theirs = _logits(model, inputs), _logits(reference, inputs)
    if ours.shape != theirs.shape:
        raise UserError(f"the models do not compare: logits {tuple(ours.shape)} and {tuple(theirs.shape)}")
    mask = inputs.get("attention_mask")
    kept = torch.ones(ours.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
    ours, theirs = ours[kept], theirs[kept]
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    difference = float((ours - theirs).abs().max())
    report = _report(model)
    return Verification(
        kl=float(kl.mean()),
        kl_worst=float(kl.max()),
        logit_difference=difference,
        tokens=len(kl),
        residual=None if report is None else report.residual,
        sites=() if report is None else report.sites,
    )


def _report(model: nn.Module) -> Any:
    try:
        return conversion_of(model)[0].report
    except UserError:
        return None


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    device = next(model.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: a hook takes it from there
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**moved).logits
    model.train(training)
    return logits.double().cpu()
