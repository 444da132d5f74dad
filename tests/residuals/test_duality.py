"""Residual Stream Duality (arXiv 2603.16039): a depth window is a short window along the other axis.

One side is the residual, which attends from one state to the few it has kept, as the network goes
down; the other is the decoder's ShortSWA sublayer, which attends along a whole sequence with a mask.
They share parameters and no code.
"""

import pytest
import torch
from torch.testing import assert_close

from headwater.models import ModelConfig
from headwater.models.attention import Attention
from headwater.residuals import build

STATES, TOKENS, DIM = 6, 5, 8
MAPS = ("query", "key", "value", "output")


def scattered(spec):
    torch.manual_seed(0)
    residual = build(f"{spec},width={DIM}", DIM, STATES).double()
    for parameter in residual.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return residual


def depth_reads(residual):
    """The normed state before each read, and what the read added to it, (states, tokens, D) each."""
    states, added = [], []
    state = residual.begin(torch.randn(TOKENS, DIM, dtype=torch.float64))
    for i in range(STATES):
        before = state[0]
        x, state = residual.read(state, i)
        square = before.square().mean(-1, keepdim=True)
        states.append(before * torch.rsqrt(square + 1e-6))
        added.append(x - before)
        state = residual.write(state, i, torch.randn(TOKENS, DIM, dtype=torch.float64))
    return torch.stack(states), torch.stack(added)


def short_attention(stack, maps, window):
    """ShortSWA along axis 0 of a stack (states, tokens, D), which becomes the sequence; tokens are its batch."""
    shape = {"vocab_size": 2, "dim": DIM, "layers": 1, "mlp_dim": 8, "context": 16}
    config = ModelConfig(**shape, heads=1, kv_heads=1, shortswa=window)
    attention = Attention(config, window=window).double()
    for name in MAPS:
        if getattr(maps, name) is not None:  # the first read has one source: any query will do
            getattr(attention, name).weight.data.copy_(getattr(maps, name))
    # Rotary tables that turn nothing
    cosines = torch.ones(STATES, DIM // 2, dtype=torch.float64)
    y, _ = attention(stack.transpose(0, 1), (cosines, 0 * cosines))
    return y.transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("window", [2, 4, STATES])
def test_maps_shared_over_depth_are_short_attention_over_the_transposed_stack(window):
    """The formal claim: at every depth at once."""
    residual = scattered(f"depth-window:maps=shared,window={window}")
    states, added = depth_reads(residual)
    expected = short_attention(states, residual.reads["0"], window)
    assert_close(added, expected, atol=1e-12, rtol=1e-12)
    if window < STATES:
        wider = short_attention(states, residual.reads["0"], window + 1)
        assert (wider - added).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("window", [2, 4, STATES])
def test_a_layer_s_own_maps_are_short_attention_at_its_depth(window):
    """The paper's read: at depth l, short attention with the maps of layer l."""
    residual = scattered(f"depth-window:maps=reader,window={window}")
    states, added = depth_reads(residual)
    for depth in range(STATES):
        expected = short_attention(states, residual.reads[str(depth)], window)[depth]
        assert_close(added[depth], expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_keys_that_each_state_makes_are_another_operator_unless_maps_are_equal():
    residual = scattered("depth-window:window=3")
    states, added = depth_reads(residual)
    last = short_attention(states, residual.reads[str(STATES - 1)], 3)[-1]
    assert (last - added[-1]).abs().max() > 1e-2
    for maps in residual.reads.values():
        for name in MAPS:
            if getattr(maps, name) is not None:
                getattr(maps, name).copy_(getattr(residual.reads["1"], name))
    states, added = depth_reads(residual)
    expected = short_attention(states, residual.reads["1"], 3)
    assert_close(added, expected, atol=1e-12, rtol=1e-12)
