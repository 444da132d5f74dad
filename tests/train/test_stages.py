"""Cuts and hops without processes: what crosses a cut, for every residual and for grids nobody here has."""

import functools
from itertools import pairwise

import pytest
import torch
from tinyrun import changed
from torch import Tensor

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import build, names
from headwater.residuals.two_phase import TwoPhase
from headwater.runs.settings import Config
from headwater.stages import BlockCache, States, hops, trace
from headwater.train.distributed.pipeline import Stage
from headwater.train.distributed.stages import cut, prune, trace_states, windows_per_micro

CPU = torch.device("cpu")
WIDE = [
    f"ddl:width=2,compress={c},expand={e}" for c, e in (("channel", "token"), ("token", "repeat"))
]
SPECS = [
    *names(),
    *WIDE,
    "attnres-full:window=2",
    "laurel:form=previous",
    "deepcrossattention:last=1",
    "depth-window:maps=reader",
]


def shape(residual: str, layers: int = 6, **changes) -> ModelConfig:
    size = {"vocab_size": 32, "dim": 8, "heads": 2, "kv_heads": 1, "mlp_dim": 16}
    return ModelConfig(**size, layers=layers, residual=residual, **changes)


@functools.cache
def traced(residual: str) -> States:
    return trace_states(shape(residual), 1, 4, CPU)


def depth(sublayers: int, spec: str = "standard"):
    return build(spec, 8, sublayers)


def test_cuts_are_even_or_as_asked():
    eight = depth(8)
    assert cut(eight, 4) == (0, 2, 4, 6, 8)
    assert cut(depth(10), 4) == (0, 2, 5, 7, 10)
    assert cut(eight, 3, (1, 7)) == (0, 1, 7, 8)
    for cuts in ((1,), (4, 2), (0, 4), (4, 8)):
        with pytest.raises(UserError, match=r"parallel\.cuts must name 2 sublayers, rising, where"):
            cut(eight, 3, cuts)
    with pytest.raises(UserError, match="divide into 8 stages at most, not 9"):
        cut(eight, 9)


@pytest.mark.parametrize(
    ("batch", "micros", "data", "layout", "advice"),
    [
        (2, 1, 3, {}, r"batch_size \(2\) must be .* the 3 ranks that .*: try train.batch_size 3"),
        (12, 2, 4, {}, "train.batch_size 16"),
        (6, 1, 1, {"pipeline": 2}, r"pipeline \(2\) .*; got 1: try train.accumulate 2"),
        (5, 5, 1, {"pipeline": 2, "chunks": 2}, "train.accumulate 6"),
        (6, 6, 1, {"pipeline": 2, "chunks": 2}, ""),
        (6, 3, 1, {"pipeline": 2}, ""),
        (6, 1, 1, {"pipeline": 2, "pipeline_schedule": "gpipe"}, ""),
    ],
)
def test_a_batch_that_the_ranks_cannot_share_is_refused(batch, micros, data, layout, advice):
    """The message has a number that would do; torch's own message names no flag."""
    config = changed(Config(), batch_size=batch, accumulate=micros, **layout)
    if advice:
        with pytest.raises(UserError, match=advice):
            windows_per_micro(config, data)
    else:
        assert windows_per_micro(config, data) == batch // (micros * data)


def test_no_cut_falls_where_two_stages_would_share_a_parameter():
    """The sublayers of a layer share the compressor of a wide delta residual."""
    wide = depth(48, "ddl:width=2,compress=channel")
    assert cut(wide, 5) == (0, 8, 18, 28, 38, 48)
    assert all(bound % 2 == 0 for bound in cut(wide, 24))
    with pytest.raises(UserError, match=r"may be cut: 2, 4, 6, .*; got \[3\]"):
        cut(wide, 2, (3,))
    with pytest.raises(UserError, match="divide into 24 stages at most, not 25"):
        cut(wide, 25)
    shared = depth(8, "depth-window:maps=shared")
    assert cut(shared, 1) == (0, 8)
    with pytest.raises(UserError, match="divide into 1 stages at most, not 2"):
        cut(shared, 2)
    with pytest.raises(UserError, match=r"may be cut: nowhere; got \[4\]"):
        cut(shared, 2, (4,))


@pytest.mark.parametrize("residual", SPECS)
def test_every_tensor_is_on_its_rank_when_it_is_needed(residual):
    """A stage has what it was sent, what its rank was sent or made before, and nothing else."""
    states = traced(residual)
    for ranks, chunks in ((2, 1), (2, 2), (3, 2)):
        bounds = cut(depth(12, residual), ranks * chunks)
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
    """One block a stage: naive and cached totals of docs/explanation/pipeline-cache.md, in tensors."""
    stages = ranks * chunks
    states = trace_states(shape("attnres-block:block=2", layers=stages), 3, 5, CPU)
    bounds, totals = cut(depth(2 * stages), stages), {}
    for cache in (True, False):
        plan = hops(states, bounds, ranks, cache=cache)
        totals[cache] = sum(len(hop.arrives) for hop in plan)
    assert totals[False] == stages * (stages - 1) // 2 + stages - 1
    ours = ranks * (ranks - 1) // 2 + ranks - 1 + (chunks - 1) * ranks * (ranks - 1)
    paper = ranks * (ranks - 1) // 2 + (chunks - 1) * ranks**2
    assert totals[True] == ours
    # A rank is not sent the block it made itself
    assert paper - (ours - (ranks - 1)) == (chunks - 1) * ranks
    last = hops(states, bounds, ranks, cache=False)[-1]
    assert last.bytes == stages * 3 * 5 * 8 * 4  # of (B, T, D) in fp32


@pytest.mark.parametrize("residual", ["standard", "attnres-block", WIDE[0]])
def test_stages_of_a_tied_model_hold_each_parameter_once_and_the_embedding_twice(residual):
    model = Decoder(shape(residual, tie_embeddings=True, value_residual=True, shortswa=2))
    held = []
    for start, stop in pairwise(cut(model.residual, 3)):
        stage = prune(Decoder(model.config), start, stop)
        held += [name for name, _ in stage.named_parameters()]
    whole = {name for name, _ in model.named_parameters()}
    assert set(held) == whole
    assert len(held) == len(whole) + 1


@pytest.mark.parametrize("residual", SPECS)
def test_a_residual_alone_is_traced_as_in_a_decoder(residual):
    """The residual decides which tensors are the same at two places."""
    alone = depth(12, residual)
    if residual.partition(":")[0] in ("attnres-routed", "deepcrossattention", "muddformer"):
        with pytest.raises(ValueError, match="three inputs"):
            trace(alone, 1, 4)
    else:
        assert trace(alone, 1, 4) == traced(residual)


def stir(model: Decoder) -> Decoder:
    """Off its start, where many residuals are the plain one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.residual.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def staged(
    whole: Decoder, states: States, bounds: tuple[int, ...], tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of stages on two ranks, one after the other here, and the gradients of their mean square."""
    plan = (*hops(states, bounds, 2, cache=True), None)
    caches, runs, arrived = (BlockCache(), BlockCache()), [], (tokens,)
    for s, span in enumerate(pairwise(bounds)):
        part = Decoder(whole.config)
        part.load_weights(whole.weights())
        stage = Stage(
            prune(part, *span), span, tokens.shape[1], plan[s], plan[s + 1], caches[s % 2]
        )
        arrived = tuple(t.detach().requires_grad_() for t in arrived) if s else arrived
        out = stage(*arrived, micro=torch.tensor(0))
        runs.append((part, arrived, out))
        arrived = out
    logits, owed, gradients = out, [None], {}
    for part, arrived, out in reversed(runs):
        last = isinstance(out, Tensor)
        torch.autograd.backward(out.square().mean() if last else out, None if last else owed)
        owed = [t.grad for t in arrived]
        gradients |= {name: p.grad for name, p in part.named_parameters()}
    assert not any(cache.tensors or cache.deposits for cache in caches)
    return logits, gradients


def assert_the_same(
    whole: Decoder, expected: Tensor, logits: Tensor, gradients: dict[str, Tensor]
) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = {name: p.grad for name, p in whole.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("residual", SPECS)
def test_stages_do_what_the_whole_does(residual):
    """Cuts inside of a layer and a block where the residual allows them; what a rank has seen is not sent again."""
    whole = stir(Decoder(shape(residual)))
    tokens = torch.tensor([[3, 7, 1, 30]])
    inside = all(map(whole.residual.may_cut, (1, 7, 11)))
    cuts = (1, 7, 11) if inside else (2, 6, 10)
    expected = whole(tokens)
    expected.square().mean().backward()
    assert_the_same(whole, expected, *staged(whole, traced(residual), (0, *cuts, 12), tokens))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_stages_with_kernels_do_what_the_whole_does_in_two_phases(block, monkeypatch):
    """Cuts inside a block (1, 5), between two (3), and before the last sublayer. A stage is sent sources alone, and
    scores them for the queries it has."""
    whole = stir(Decoder(shape(f"attnres-block:block={block},backend=triton", layers=3, context=2)))
    real, spans = TwoPhase.read, []

    def read(self, *arguments):
        spans.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(TwoPhase, "read", read)
    expected = whole(torch.tensor([[3, 7]]))
    assert spans, "the whole runs in two phases"
    expected.square().mean().backward()
    spans.clear()
    states = trace_states(whole.config, 1, 2, CPU)
    logits, gradients = staged(whole, states, (0, 1, 3, 5, 6), torch.tensor([[3, 7]]))
    assert len(spans) == 7, "every read of the stages is in two phases"
    assert_the_same(whole, expected, logits, gradients)
