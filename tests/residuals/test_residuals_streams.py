"""Residuals with n streams: what a state looks like, and what is kept for the backward pass."""

import pytest
import torch

from headwater.residuals import build

BATCH, TOKENS, DIM, SUBLAYERS, STREAMS = 3, 5, 64, 6, 4
SPECS = ["hyper-connections", "hyper-connections:form=static", "mhc", "mhc-lite", "ddl:width=4,compress=channel"]


def scattered(spec):
    torch.manual_seed(0)
    residual = build(spec, DIM, SUBLAYERS)
    for p in residual.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return residual, [torch.randn(BATCH, TOKENS, DIM, requires_grad=True) for _ in range(SUBLAYERS + 1)]


@pytest.mark.parametrize("spec", SPECS)
def test_streams_sit_beside_the_channels_not_in_the_batch(spec):
    residual, (x, *outputs) = scattered(spec)
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        assert state[0].shape == (BATCH, TOKENS, STREAMS, DIM)
        read, state = residual.read(state, i)
        assert read.shape == (BATCH, TOKENS, DIM)
        assert all(part.shape[:2] == (BATCH, TOKENS) for part in state)
        assert sum(part.numel() for part in state) < 1.5 * BATCH * TOKENS * STREAMS * DIM  # the rest are coefficients
        state = residual.write(state, i, y)
        assert len(state) == 1


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("ddl")])
def test_a_sublayer_keeps_its_n_streams_and_no_copy_of_them(spec):
    residual, (x, *outputs) = scattered(spec)
    given = {t.untyped_storage().data_ptr() for t in (x, *outputs, *residual.parameters())}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state = residual.begin(x)
        for i, y in enumerate(outputs):
            _, state = residual.read(state, i)
            state = residual.write(state, i, y)
        residual.end(state).sum()
    wide = [tensor.untyped_storage().nbytes() // 4 for tensor in kept.values()]
    streams = BATCH * TOKENS * STREAMS * DIM
    assert max(wide) == streams
    assert sum(size >= BATCH * TOKENS * DIM for size in wide) <= SUBLAYERS  # one state a sublayer
