"""Each residual against its formula, written a second time in the plainest way, on fixed sources in fp64."""

import pytest
import torch

from headwater.residuals import build, names
from headwater.residuals.formulas import FORMULAS, formula_of
from headwater.residuals.record import replay

DIM, SUBLAYERS = 8, 6
OPTIONS = [
    "attnres-block:block=2",
    "attnres-block:block=4",  # the last block is partial
    "highway:gate=channel",
    "laurel:form=previous,states=2,rank=3",
    "laurel:form=weighted",
    "laurel:form=weighted-low-rank,rank=3",
    "denseformer:dilation=2",
    "denseformer:period=2",
    "denseformer:dilation=2,period=3",
    "denseformer:dilation=3,period=2",
    "elc-bert:variant=base",
    "elc-bert:variant=normalized",
    "elc-bert:variant=weighted-output",
    "deepcrossattention:version=v1",
    "deepcrossattention:version=v2",
    "deepcrossattention:last=1",
    "deepcrossattention:version=v1,last=1",
    "deepcrossattention:version=v2,inputs=shared,last=2",
    "hyper-connections:streams=3",
    "hyper-connections:streams=3,form=static",
    "mhc:streams=3",
    "mhc-lite:streams=3",
    "ddl:value=linear",
    "ddl:width=3,compress=channel",
    "ddl:width=3,compress=channel,value=linear,expand=token",
    "ddl:width=2,compress=token",
    "ddl:width=2,compress=token,value=linear,expand=token",
    "depth-window:window=2,width=3",
    "delta-attnres:block=2",
]


def scattered(spec, sublayers=SUBLAYERS):
    """A residual in fp64 with random parameters, and random sources."""
    torch.manual_seed(0)
    residual = build(spec, DIM, sublayers).double()
    with torch.no_grad():
        for p in residual.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return residual, list(torch.randn(sublayers + 1, 2, 5, DIM, dtype=torch.float64))


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_reads_are_the_formula_s(spec):
    residual, sources = scattered(spec)
    expected = []

    def run(i, read):
        assert i == len(expected)
        expected.append(read)
        return sources[i + 1]

    expected.append(formula_of(residual)(residual, sources[0], run))
    reads = replay(residual, sources)
    assert len(reads) == len(expected) == SUBLAYERS + 1
    for read, wanted in zip(reads, expected):
        read, wanted = (torch.stack(x) if isinstance(x, tuple) else x for x in (read, wanted))
        torch.testing.assert_close(read, wanted, atol=1e-12, rtol=1e-12)


def test_every_residual_has_a_formula():
    assert set(FORMULAS) == set(names())


def test_laurel_starts_with_the_paper_s_down_matrix():
    down = build("laurel:rank=3", DIM, 2).low_rank["0"].down
    expected = torch.tensor([[float(c % 3 == r) for c in range(DIM)] for r in range(3)]) / (3 * DIM) ** 0.5
    torch.testing.assert_close(down, expected)


def test_denseformer_keeps_only_what_a_later_sum_reads():
    residual, (x, *outputs) = scattered("denseformer:dilation=2,period=2", sublayers=8)
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        _, state = residual.read(state, i)
        state = residual.write(state, i, y)
    assert len(state) == 3  # layer outputs 0, 2 and 4, not 1 and 3


def test_the_cross_attention_query_can_leave_zero():
    residual = build("deepcrossattention", DIM, SUBLAYERS)
    reads = replay(residual, list(torch.randn(SUBLAYERS + 1, 2, 3, DIM)))
    reads[-1].square().sum().backward()
    gradient = residual.grns[str(SUBLAYERS)].query.grad
    assert gradient is not None
    assert gradient.abs().min() > 0


def test_permutation_mixtures_are_doubly_stochastic_without_iterations():
    residual, (x, *_) = scattered("mhc-lite:streams=4")
    res = residual.coefficients(residual.begin(x)[0], 0)[2]
    for axis in (-1, -2):
        torch.testing.assert_close(res.sum(axis), torch.ones(2, 5, 4, dtype=torch.float64), atol=1e-14, rtol=0)


def test_delta_learning_contracts_the_error_along_its_direction():
    residual, (x, y, *_) = scattered("ddl")
    _, state = residual.read(residual.begin(x), 0)
    (after,) = residual.write(state, 0, y)
    write = residual.writes["0"]
    k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    beta = 2 * torch.sigmoid(unit(x) @ write.beta_weight[0] + write.beta_bias)
    value = 4 * torch.sigmoid(x @ write.value_weight[0] + write.value_bias)
    before_error, after_error = (k * x).sum(-1) - value, (k * after[..., 0, :]).sum(-1) - value
    torch.testing.assert_close(after_error, (1 - beta) * before_error, atol=1e-8, rtol=1e-8)
