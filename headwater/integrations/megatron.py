"""headwater's residuals in Megatron-Core: a GPTModel whose layers pass on the state of a residual.

    from headwater.integrations.megatron import tensor_shapes, with_residual

    model = with_residual(GPTModel(config, layer_spec, ...), "attnres-block:block=8")
    forward_backward(..., adjust_tensor_shapes_fn=tensor_shapes(model))

The layers keep their parts. Stages of a 1F1B pipeline send the state as one tensor, and the schedule learns its width
from `tensor_shapes`. Interleaved schedules have one shape for all hops, so they do not work.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwater.residuals import Residual, State, build
from headwater.stages import Slot, trace

TESTED = "0.16.1"
Shapes = list[tuple[int, ...]]


class ResidualBlock(TransformerBlock):
    """Megatron's decoder, which calls the parts of its layers between reads and writes."""

    residual: Residual
    span: tuple[int, int]  # of sublayers
    arrives: Sequence[Slot]  # for one token
    leaves: Sequence[Slot]

    def forward(self, hidden_states: Any, attention_mask: Any, **options: Any) -> Tensor:
        residual, (start, stop) = self.residual, self.span
        if self.pre_process:
            state = residual.begin(hidden_states)
        else:
            state = residual.adopt(unpacked(self.input_tensor, self.arrives), start)

        recompute = self.config.recompute_granularity == "full" and self.training
        for layer in self.layers:
            arguments = (layer, attention_mask, options.get("rotary_pos_emb"), *state)
            if recompute:
                state = checkpoint(self.pass_through, *arguments, use_reentrant=False)
            else:
                state = self.pass_through(*arguments)

        if self.post_process:
            return residual.end(state, norm=self.final_layernorm)
        return packed(residual.settle(state, stop))

    def pass_through(self, layer: Any, mask: Any, rotary_pos_emb: Any, *state: Tensor) -> State:
        residual, i = self.residual, 2 * (layer.layer_number - 1)
        x, before = residual.read(state, i, norm=layer.input_layernorm)
        y = layer.self_attention(x, attention_mask=mask, rotary_pos_emb=rotary_pos_emb)
        between = residual.write(before, i, with_bias(*y))
        x, before = residual.read(between, i + 1, norm=layer.pre_mlp_layernorm)
        return tuple(residual.write(before, i + 1, with_bias(*layer.mlp(x))))


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias that Megatron's linears leave to the addition of the stream."""
    return y if bias is None else y + bias


def packed(state: State) -> Tensor:
    """Return a state as one tensor, (tokens, batch, numbers of a token)."""
    return torch.cat([tensor.flatten(2) for tensor in state], dim=-1)


def unpacked(arrived: Tensor, slots: Sequence[Slot]) -> State:
    """Return the state that a stage was sent."""
    parts = arrived.split(widths(slots), dim=-1)
    state = []
    for part, slot in zip(parts, slots, strict=True):
        state.append(part.reshape(*part.shape[:2], *slot.shape[2:]))
    return tuple(state)


def widths(slots: Sequence[Slot]) -> list[int]:
    return [math.prod(slot.shape[2:]) for slot in slots]


def with_residual(model: GPTModel, residual: str) -> GPTModel:
    """Give a model of Megatron-Core, or a stage of one, another residual.

    Arguments:
        model: before it is wrapped for data parallelism, and before weights are loaded.
        residual: a registered name with its options, such as "attnres-block:block=8".

    Returns the same model, whose decoder has the residual as `model.decoder.residual`.
    Raises ValueError for a residual or a setting that does not fit.
    """
    if version("megatron-core") != TESTED:
        warnings.warn(
            f"headwater was tested with Megatron-Core {TESTED}, and this is {version('megatron-core')}",
            stacklevel=2,
        )
    block: Any = model.decoder
    config = block.config
    depth = build(residual, config.hidden_size, 2 * config.num_layers)
    states = trace(depth, batch=1, tokens=1)  # refuses residuals with three inputs
    if config.hidden_dropout:
        raise ValueError("headwater's residuals have no dropout: set hidden_dropout to 0")
    if not depth.token_local or depth.weight_gain != 1:
        raise ValueError(
            f"'{depth.spec}' looks at earlier tokens or scales a model's weights, which Megatron does not offer"
        )

    layers = [layer.layer_number for layer in block.layers]
    start, stop = 2 * (layers[0] - 1), 2 * layers[-1]
    if not depth.may_cut(start):
        raise ValueError(
            f"'{depth.spec}' shares parameters across layer {layers[0]}, where a stage begins"
        )
    depth.keep_only(start, stop)
    for parameter in depth.parameters():
        # Megatron adds up gradients over the ranks of a sequence where a parameter says so.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    device = next(block.parameters()).device
    block.residual = depth.to(device=device, dtype=config.params_dtype)
    block.span, block.arrives, block.leaves = (start, stop), states[start], states[stop]
    block.__class__ = ResidualBlock
    return model


def tensor_shapes(model: GPTModel) -> Callable[[Shapes, Shapes], tuple[Shapes, Shapes]]:
    """Return what the 1F1B schedule takes as `adjust_tensor_shapes_fn`: the shapes of a stage's two hops."""
    block: Any = model.decoder
    incoming, outgoing = sum(widths(block.arrives)), sum(widths(block.leaves))

    def adjust(receive: Shapes, send: Shapes) -> tuple[Shapes, Shapes]:
        received = [(*shape[:-1], incoming) for shape in receive]
        return received, [(*shape[:-1], outgoing) for shape in send]

    return adjust
