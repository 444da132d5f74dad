"""Cuts and hops without processes: what crosses a cut, for every residual and for grids nobody here has."""

import math
from itertools import pairwise

import pytest
import torch

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import names
from headwater.train.stages import cut, hops, prune, trace_states

CPU = torch.device("cpu")


def shape(residual: str, layers: int = 8, **changes) -> ModelConfig:
    return ModelConfig(
        vocab_size=32, dim=8, layers=layers, heads=2, kv_heads=1, mlp_dim=16, residual=residual, **changes
    )


def test_cuts_are_even_or_as_asked():
    assert cut(8, 4) == (0, 2, 4, 6, 8)
    assert cut(10, 4) == (0, 2, 5, 7, 10)
    assert cut(8, 3, (1, 7)) == (0, 1, 7, 8)
    for cuts in ((1,), (4, 2), (0, 4), (4, 8)):
        with pytest.raises(UserError, match=r"parallel\.cuts must name 2 sublayers, rising, from 1 to 7"):
            cut(8, 3, cuts)
    with pytest.raises(UserError, match="8 sublayers do not divide into 9 stages"):
        cut(8, 9)


@pytest.mark.parametrize("residual", names())
def test_every_tensor_is_on_its_rank_when_it_is_needed(residual):
    """A stage has what it was sent, what its rank was sent or made before, and nothing else."""
    states = trace_states(shape(residual), 1, 4, CPU)
    for ranks, chunks in ((2, 1), (2, 4), (4, 2)):
        bounds = cut(16, ranks * chunks)
        for cache in (True, False):
            on_rank = [set() for _ in range(ranks)]
            for s, hop in enumerate(hops(states, bounds, ranks, cache=cache)):
                mine = on_rank[s % ranks]
                if s:
                    before = states[bounds[s]]
                    arrived = {before[j].key for j in hop.arrives}
                    assert not (cache and arrived & mine), "sent twice"
                    assert {slot.key for slot in before} <= (arrived | mine if cache else arrived)
                    mine |= arrived
                mine |= {slot.key for slot in states[bounds[s + 1]]}


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (2, 4), (8, 4)])
def test_totals_in_closed_form(ranks, chunks):
    """One block a stage: naive and cached totals of docs/pipeline-cache.md, in tensors."""
    stages = ranks * chunks
    states = trace_states(shape("attnres-block:block=2", layers=stages), 1, 4, CPU)
    totals = {
        cache: sum(len(hop.arrives) for hop in hops(states, cut(2 * stages, stages), ranks, cache=cache))
        for cache in (True, False)
    }
    assert totals[False] == stages * (stages - 1) // 2 + stages - 1
    ours = ranks * (ranks - 1) // 2 + ranks - 1 + (chunks - 1) * ranks * (ranks - 1)
    paper = ranks * (ranks - 1) // 2 + (chunks - 1) * ranks**2
    assert totals[True] == ours
    assert paper - (ours - (ranks - 1)) == (chunks - 1) * ranks  # a rank is not sent the block it made itself


def test_one_block_over_several_stages():
    """Figure 3 of the paper: four ranks, two chunks, a block every other stage. Beside new blocks, the running sum."""
    states = trace_states(shape("attnres-block:block=4", layers=8), 1, 4, CPU)
    plan = hops(states, cut(16, 8), 4, cache=True)
    assert [len(hop.arrives) for hop in plan] == [0, 2, 2, 3, 2, 2, 2, 2]
    assert [len(hop.state) for hop in plan] == [0, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("residual", names())
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_each_parameter_once(residual, tied):
    config = shape(residual, layers=4, tie_embeddings=tied, value_residual=True, shortswa=2)
    whole = {name for name, _ in Decoder(config).named_parameters()}
    bounds = cut(12, 5)
    held = [name for a, b in pairwise(bounds) for name, _ in prune(Decoder(config), a, b).named_parameters()]
    assert set(held) == whole
    assert len(held) == len(whole) + tied  # the tied embedding lives at both ends


def test_bytes_of_a_hop():
    states = trace_states(shape("attnres-block:block=2"), 3, 5, CPU)
    hop = hops(states, cut(16, 4), 4, cache=True)[2]
    assert hop.bytes == (1 + math.ceil(8 / 2)) * 3 * 5 * 8 * 4
