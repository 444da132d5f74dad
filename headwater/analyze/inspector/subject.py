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
from headwater.residuals.base import unwatched
from headwater.residuals.record import replay

from .forward_pass import Top


class Subject:
    """A `Decoder`, or a transformers model whose residual `headwater.convert` has swapped."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.converted = not isinstance(model, Decoder)
        residuals = _outermost_residuals(model)
        if len(residuals) != 1:
            raise UserError(_refusal(model, len(residuals)))
        if not isinstance(model, Decoder) and not hasattr(model, "get_output_embeddings"):
            raise UserError(
                "the inspector takes headwater's Decoder, or a transformers model that is "
                f"converted; got a {type(model).__name__}. Of a network of your own, "
                "headwater.record and headwater.mixing say who reads whom"
            )
        self.residual = residuals[0]
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
        # ModernBERT's lm_head is no output embedding, and stands before it.
        before = getattr(self.model, "lm_head", head)
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
        """Run the model: what was read and written, the final norm as it was applied, the logits,
        and the experts that sublayers chose."""
        # A first pass for the final norm, the logits and the experts; a second one for the trace.
        pass_ = _Pass()
        with watched(self.residual, pass_), _routed(self.model, pass_) as experts:
            logits = self.logits(tokens)
        with record(self.residual) as trace:
            self.logits(tokens)
        assert pass_.norm is not None
        read = trace.reads[-1]
        assert isinstance(read, Tensor)
        self._check_sources(trace, read)
        again = self.head(pass_.norm(read)).float()
        self._check_head(again, logits)
        return trace, pass_.norm, logits, experts

    def _check_sources(self, trace: Trace, read: Tensor) -> None:
        """Make the final read again of what the sublayers wrote: a model may add to its streams in
        between."""
        with unwatched():
            again = replay(self.residual, trace.sources)[-1]
        assert isinstance(again, Tensor)
        difference = float((again - read).norm() / read.norm())
        if difference > 1e-2:
            raise UserError(
                f"cannot inspect this {type(self.model).__name__}: its final read does not follow from what its "
                f"sublayers wrote, from which it is off by {difference:.2g}, relative. The model must add something "
                "to its streams in between. headwater.record works on it"
            )

    def _check_head(self, again: Tensor, logits: Tensor) -> None:
        """Compare logits computed apart from the model, which may do more than is known here."""
        # In half precision logits differ by rounding alone.
        exact = next(self.model.parameters()).dtype == torch.float32
        tolerance = 1e-3 if exact else 1e-2
        difference = "have another shape"
        if again.shape == logits.shape:
            if torch.allclose(again, logits, rtol=tolerance, atol=tolerance):
                return
            difference = f"differ by {(again - logits).abs().max():.2g}"
        raise UserError(
            f"cannot inspect this {type(self.model).__name__}: its final norm and output head, "
            f"applied to the final read, should give the model's logits, but {difference}. The "
            "model must do something else in between. headwater.record and headwater.mixing, which "
            "need no head, work on it"
        )


def _outermost_residuals(model: nn.Module) -> list[Residual]:
    """The residuals of a model, without those that another one is made of."""
    # hyper-attnres, for one, has two residuals inside.
    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    parts: set[nn.Module] = set()
    for residual in residuals:
        parts.update(part for part in residual.modules() if part is not residual)
    return [residual for residual in residuals if residual not in parts]


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
    """The head with what some architectures do to its logits.

    Gemma and RecurrentGemma have a soft cap, Granite, Cohere and Inkling a scale; Inkling's last
    rows are padding.
    """

    def setting(*names: str) -> Any:
        for name in names:
            if value := getattr(config, name, None):
                return value
        return None

    cap = setting("final_logit_softcapping", "logits_soft_cap")
    used = setting("unpadded_vocab_size")
    divisor = setting("logits_scaling", "logits_mup_width_multiplier") or 1.0
    scale = (setting("logit_scale") or 1.0) / divisor

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
        "headwater.convert(model), or `headwater convert FOLDER --out OTHER`; of a model released with a residual of "
        "its own, headwater.hf.open_residual(model)"
    )


@contextmanager
def _routed(model: nn.Module, pass_: _Pass) -> Iterator[dict[int, Top]]:
    """Inside, a forward pass of one row of tokens fills the dictionary with the experts of each
    sublayer, by their weight. A decoder's routers tell them; in transformers, the arguments of a
    module `experts`."""
    tops: dict[int, Top] = {}

    def keep(experts: Tensor, weights: Tensor) -> None:
        weights = weights.detach().float().cpu()
        weights, order = weights.sort(-1, descending=True)
        experts = experts.cpu().gather(-1, order)
        tops[pass_.reading] = Top(experts, weights)

    def of_router(_module: nn.Module, _inputs: Any, routes: Routes) -> None:
        keep(routes.experts, routes.weights)

    def of_experts(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        chosen = _chosen(inputs)
        if chosen is not None:
            keep(*chosen)

    # Ours first; where there are none, the model may be of transformers.
    handles = []
    for module in model.modules():
        if isinstance(module, Router):
            handles.append(module.register_forward_hook(of_router))
    if not handles:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "experts":
                handles.append(module.register_forward_pre_hook(of_experts))
    try:
        yield tops
    finally:
        for handle in handles:
            handle.remove()


def _chosen(inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Experts and their weights, (T, k) each, from the arguments of transformers' experts.

    They are x, the chosen experts, and the weights of these or of all. None where an architecture
    has other arguments.
    """
    if len(inputs) != 3:
        return None
    if not all(isinstance(argument, Tensor) and argument.dim() == 2 for argument in inputs):
        return None
    _, experts, weights = inputs
    numbers = not experts.is_floating_point() and experts.dtype != torch.bool
    if not (numbers and weights.is_floating_point()):
        return None
    return experts, weights if weights.shape == experts.shape else weights.gather(-1, experts)
