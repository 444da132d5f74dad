"""Residual Stream Duality (arXiv 2603.16039): a depth window is a short sliding window along the other axis."""

import pytest
import torch

from headwater.models import ModelConfig
from headwater.models.attention import Attention
from headwater.models.window import window_attention
from headwater.residuals import build
from headwater.residuals.window import attend

STATES, TOKENS, DIM = 6, 5, 8


def stack_of(seed=0):
    torch.manual_seed(seed)
    return torch.randn(STATES, TOKENS, DIM, dtype=torch.float64), torch.randn(3, DIM, DIM, dtype=torch.float64)


def sequence_read(x, maps, window):
    """ShortSWA along axis 1 of x (A, S, D)."""
    q, k, v = ((x @ m.T).unsqueeze(1) for m in maps)
    return window_attention(q, k, v, window).squeeze(1)


@pytest.mark.parametrize("window", [1, 2, 4, STATES])
def test_the_depth_read_is_the_sequence_operator_on_the_transposed_stack(window):
    """For every depth of a stack (depth, token, D), the same maps and the same program: equal to the last bit."""
    stack, maps = stack_of()
    transposed = sequence_read(stack.transpose(0, 1), maps, window).transpose(0, 1)
    q, k, v = (torch.einsum("ltd,ed->lte", stack, m) for m in maps)
    depth_first = window_attention(*(x.transpose(0, 1).unsqueeze(1) for x in (q, k, v)), window).squeeze(1)
    assert torch.equal(depth_first.transpose(0, 1), transposed)


@pytest.mark.parametrize("window", [1, 2, 4, STATES])
def test_the_residual_s_incremental_read_is_that_operator(window):
    """The residual attends from one state to a list of kept keys: another program, so equal up to rounding."""
    stack, maps = stack_of()
    q, k, v = (stack @ m.T for m in maps)
    expected = sequence_read(stack.transpose(0, 1), maps, window).transpose(0, 1)
    for depth in range(STATES):
        seen = slice(max(0, depth - window + 1), depth + 1)
        read = attend(q[depth], list(k[seen]), list(v[seen]))
        torch.testing.assert_close(read, expected[depth], atol=1e-13, rtol=1e-13)


def test_the_depth_window_residual_is_short_attention_over_its_own_states():
    """The residual and the decoder's ShortSWA sublayer, with shared maps and no positions, on the states it made."""
    torch.manual_seed(0)
    window = 3
    residual = build(f"depth-window:window={window},width={DIM}", DIM, STATES).double()
    config = ModelConfig(vocab_size=2, dim=DIM, layers=1, heads=1, kv_heads=1, mlp_dim=8, context=16, shortswa=window)
    attention = Attention(config, window=window).double()
    for i in range(STATES):
        read = residual.reads[str(i)]
        for mine, theirs in (("key", "key"), ("value", "value"), ("output", "output")):
            getattr(read, mine).data.copy_(getattr(attention, theirs).weight)
        if read.query is not None:
            read.query.data.copy_(attention.query.weight)
    states, added = [], []
    state = residual.begin(torch.randn(TOKENS, DIM, dtype=torch.float64))
    for i in range(STATES):
        before = state[0]
        x, state = residual.read(state, i)
        states.append(before * torch.rsqrt(before.square().mean(-1, keepdim=True) + 1e-6))
        added.append(x - before)
        state = residual.write(state, i, torch.randn(TOKENS, DIM, dtype=torch.float64))
    still = (torch.ones(STATES, DIM // 2), torch.zeros(STATES, DIM // 2))  # rotary tables that turn nothing
    along_depth, _ = attention(torch.stack(states, dim=1), tuple(table.double() for table in still))
    torch.testing.assert_close(torch.stack(added, dim=1), along_depth, atol=1e-12, rtol=1e-12)
