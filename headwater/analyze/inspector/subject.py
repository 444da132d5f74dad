"""The model that is looked at: its residual, its logits, and its output head by itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.models.moe import Router, Routes
from headwater.residuals import Norm, Read, Residual, State, Trace, Watcher, record, watched

from .inspection import Top


class Subject:
    """A `Decoder`, or a transformers model whose residual `headwater.convert` has swapped."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.converted = not isinstance(model, Decoder)
        residuals = [module for module in model.modules() if isinstance(module, Residual)]
        parts = {
            part for residual in residuals for part in residual.modules() if part is not residual
        }
        found = [
            residual for residual in residuals if residual not in parts
        ]  # one may be made of others
        if len(found) != 1:
            raise UserError(_refusal(model, len(found)))
        if not isinstance(model, Decoder) and not hasattr(model, "get_output_embeddings"):
            raise UserError(
                "the inspector takes headwater's Decoder, or a transformers model that is converted; got a "
                f"{type(model).__name__}. Of a network of your own, headwater.record and headwater.mixing say who "
                "reads whom"
            )
        self.residual = found[0]
        self.head = self._head()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.residual.kinds

    def _head(self) -> Callable[[Tensor], Tensor]:
        if isinstance(self.model, Decoder):
            return self.model.head
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise UserError(
                f"this {type(self.model).__name__} has no output head to read its depth through"
            )
        before = getattr(
            self.model, "lm_head", head
        )  # ModernBERT's is no output embedding, and stands before it
        body = head if before is head else nn.Sequential(before, head)
        config: Any = self.model.config
        return _scaled_head(body, config.get_text_config())

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, vocab), fp32."""
        if isinstance(self.model, Decoder):
            return self.model(tokens).float()
        return self.model(input_ids=tokens, use_cache=False).logits.float()

    @torch.no_grad()
    def trace(self, tokens: Tensor) -> tuple[Trace, Norm, Tensor, dict[int, Top]]:
        """One forward pass: what was read and written, the final norm as it was applied, the logits, and the experts
        that sublayers chose."""
        pass_ = _Pass()
        with watched(self.residual, pass_), _routed(self.model, pass_) as experts:
            logits = self.logits(tokens)
        with record(self.residual) as trace:
            self.logits(tokens)
        assert pass_.norm is not None
        read = trace.reads[-1]
        assert isinstance(read, Tensor)
        again = self.head(pass_.norm(read)).float()
        self._check_head(again, logits)
        return trace, pass_.norm, logits, experts

    def _check_head(self, again: Tensor, logits: Tensor) -> None:
        """What a read says is computed apart from the model, which may do more there than is known here."""
        within = 1e-3 if next(self.model.parameters()).dtype == torch.float32 else 1e-2
        if again.shape == logits.shape and torch.allclose(again, logits, rtol=within, atol=within):
            return
        apart = (
            f"{(again - logits).abs().max():.2g} apart"
            if again.shape == logits.shape
            else "of another size"
        )
        raise UserError(
            f"what a part of this {type(self.model).__name__} says is its output head after the final norm, and on the "
            f"final read that must be the model's logits; they are {apart}, so the model does something between its "
            "norm and its logits that the inspector does not know. headwater.record and headwater.mixing, which need "
            "no head, still work on it"
        )


class _Pass(Watcher):
    """Knows which sublayer runs, and keeps the norm that the final read is given."""

    norm: Norm | None = None
    reading: int = 0

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        self.reading = i
        return super().read(residual, state, i, norm)

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        self.norm = norm
        return super().end(residual, state, norm)


def _scaled_head(head: nn.Module, config: Any) -> Callable[[Tensor], Tensor]:
    """The head with what some architectures do to its logits: the soft cap of Gemma and RecurrentGemma, the scale of
    Granite, Cohere and Inkling, whose last rows are padding."""

    def setting(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    cap, used = (
        setting("final_logit_softcapping", "logits_soft_cap"),
        setting("unpadded_vocab_size"),
    )
    scale = (setting("logit_scale") or 1.0) / (
        setting("logits_scaling", "logits_mup_width_multiplier") or 1.0
    )

    def apply(x: Tensor) -> Tensor:
        logits = head(x)[..., :used] * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return apply


def _refusal(model: nn.Module, residuals: int) -> str:
    name = type(model).__name__
    if residuals > 1:
        return f"a model with one residual can be inspected, and this {name} has {residuals}: merge its adapters first"
    return (
        f"this {name} has no residual of headwater, so there is no depth to look at: convert it first, "
        "headwater.convert(model), or `headwater convert FOLDER --out OTHER`"
    )


@contextmanager
def _routed(model: nn.Module, pass_: _Pass) -> Iterator[dict[int, Top]]:
    """Inside, a forward pass of one row of tokens fills what it gives: the experts that each sublayer chose, by their
    weight. A decoder's routers say so; in transformers, what a module `experts` is called with."""
    found: dict[int, Top] = {}

    def keep(experts: Tensor, weights: Tensor) -> None:
        weights, order = weights.detach().float().cpu().sort(-1, descending=True)
        found[pass_.reading] = Top(experts.cpu().gather(-1, order), weights)

    def of_router(_module: nn.Module, _inputs: Any, routes: Routes) -> None:
        keep(routes.experts, routes.weights)

    def of_experts(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if (chosen := _chosen(inputs)) is not None:
            keep(*chosen)

    routers = [module for module in model.modules() if isinstance(module, Router)]
    named = [
        module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"
    ]
    handles = [router.register_forward_hook(of_router) for router in routers]
    handles += (
        [] if routers else [experts.register_forward_pre_hook(of_experts) for experts in named]
    )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _chosen(inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Experts and their weights, (T, k) each, of what transformers calls experts with: x, the chosen, the weights of
    those or of all. None where an architecture does it otherwise."""
    if len(inputs) != 3 or not all(isinstance(each, Tensor) and each.dim() == 2 for each in inputs):
        return None
    _, experts, weights = inputs
    if (
        experts.is_floating_point()
        or experts.dtype == torch.bool
        or not weights.is_floating_point()
    ):
        return None
    return experts, weights if weights.shape == experts.shape else weights.gather(-1, experts)
