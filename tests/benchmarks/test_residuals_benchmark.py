"""The benchmark of the residuals: its plain decoder is the same network, and its table says what the rows say."""

import pytest
import torch
from tinymodels import model_of, tokens_of

from benchmarks import residual_step
from benchmarks import residuals as table
from benchmarks.residual_step import PlainDecoder
from headwater.residuals import names


@torch.no_grad()
@pytest.mark.parametrize("spec", names())
def test_the_plain_decoder_is_the_same_network(spec):
    model, tokens = model_of(spec, scatter=True), tokens_of()
    torch.testing.assert_close(PlainDecoder(model)(tokens), model(tokens), atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("spec", names())
def test_every_formula_compiles_to_one_graph(spec):
    """Without a code generator: that the benchmark's rival can be traced whole."""
    model, tokens = model_of(spec, scatter=True, layers=1), tokens_of()
    plain = PlainDecoder(model)
    compiled = torch.compile(plain, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(tokens), plain(tokens))
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("spec", table.DUALITY)
def test_arms_of_the_duality_are_measured_with_their_switches(spec):
    model, tokens = residual_step.build(spec, 2, 8, "cpu"), torch.tensor([[1, 5, 3]])
    assert model.config.kinds.count("shortswa") == 2 * ("shortswa" in spec)
    torch.testing.assert_close(PlainDecoder(model)(tokens), model(tokens), atol=2e-4, rtol=2e-4)


def row(residual, arm, ms, layers=12, loss=6.0):
    return {
        "residual": residual,
        "arm": arm,
        "layers": layers,
        "ms": ms,
        "peak_mib": ms,
        "loss": loss,
    }


def test_ratios_mark_what_is_slower_than_the_straightforward_compile():
    rows = [
        row("standard", "eager", 10.0),
        row("standard", "compiled", 8.0),
        row("standard", "formula", 8.0),
    ]
    rows += [row("ddl", "eager", 30.0), row("ddl", "compiled", 20.0), row("ddl", "formula", 10.0)]
    plain, slow = (table.ratios(rows, name, 12) for name in ("standard", "ddl"))
    assert plain["compiled_over_straightforward"] == 1.0
    assert plain["within_limit"]
    assert slow["eager_time"] == 3.0
    assert slow["compiled_over_straightforward"] == 2.0
    assert not slow["within_limit"]
    assert "BEYOND 1.5" in table.table([plain, slow])
    rows[4]["ms"] = 14.0
    assert table.ratios(rows, "ddl", 12)["within_limit"]


@pytest.mark.parametrize("spec", names())
@pytest.mark.parametrize("rule_layers", [2, 12])
def test_the_verdict_can_fail_for_every_residual(spec, rule_layers):
    """The rows that its own jobs would leave, with a formula faster than both of ours."""
    jobs = table.jobs_of([spec], rule_layers, True)
    rows = [
        row(spec, arm, 1.0 if arm == "formula" else 2.0, job.layers)
        for job in jobs
        for arm in job.arms
    ]
    assert table.ratios(rows, spec, rule_layers)["within_limit"] is False


def test_without_its_formula_there_is_no_verdict():
    rows = [row("rezero", "eager", 1.0), row("rezero", "compiled", 1.0)]
    assert "within_limit" not in table.ratios(rows, "rezero", 12)


def test_a_red_gate_gives_no_verdict():
    rows = [
        row("standard", "eager", 1.0),
        row("ddl", "eager", 1.0),
        row("ddl", "formula", 1.0, loss=7.0),
    ]
    verdict = table.ratios(rows, "ddl", 12)
    assert "losses differ" in verdict["error"]
    assert "within_limit" not in verdict


def test_each_residual_is_compared_with_its_formula_at_the_depth_of_the_rule():
    def jobs(rule_layers, rule=True):
        return [
            (job.arms, job.layers)
            for job in table.jobs_of(["standard", "ddl", "mhc"], rule_layers, rule)
        ]

    both = ("eager", "compiled")
    # Unrolled, the last takes too long to compile at 12
    rivals = [(("formula",), 12)] * 2 + [((*both, "formula"), 2)]
    assert jobs(12) == [(both, 12)] * 3 + rivals
    assert jobs(2) == [(("eager",), 12)] * 3 + [((*both, "formula"), 2)] * 3
    assert jobs(12, rule=False) == [(("eager",), 12)] * 3
