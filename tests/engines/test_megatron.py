"""A GPTModel of Megatron-Core with headwater's residuals: the same losses on two ranks. `make test-engines`."""

import importlib.util
from pathlib import Path

import pytest
from launch import assert_close, losses_of, run_all

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed here: make test-engines", allow_module_level=True)

RUNS = Path(__file__).with_name("megatron_runs.py")
RESIDUALS = ("attnres-block:block=2", "mhc", "denseformer")
# Numbers of a token that reach the second stage: blocks and the partial sum, streams, averages.
ARRIVE = {"attnres-block:block=2": 3 * 64, "mhc": 4 * 64, "denseformer": 3 * 64}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    runs: dict[str, dict] = {"plain": {}, "standard": {"residual": "standard"}}
    for residual in RESIDUALS:
        runs[residual] = {"residual": residual}
    runs["recomputed"] = {"residual": RESIDUALS[0], "recompute": True}
    results = run_all(RUNS, 1, list(runs.values()))
    return {name: losses_of(ranks) for name, ranks in zip(runs, results, strict=True)}


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], list[dict]]:
    runs = {}
    for residual in RESIDUALS:
        for layout in ("pipeline", "tensor"):
            runs[residual, layout] = {"residual": residual, layout: True}
    results = run_all(RUNS, 2, list(runs.values()))
    return dict(zip(runs, results, strict=True))


def test_the_plain_residual_is_megatrons_own_model(alone):
    assert alone["standard"] == alone["plain"]
    assert alone["mhc"] != alone["plain"]


def test_recomputed_layers_do_the_same(alone):
    assert alone["recomputed"] == alone[RESIDUALS[0]]


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_two_processes_do_what_one_does(alone, pairs, residual, layout):
    assert_close(losses_of(pairs[residual, layout]), alone[residual], 1e-5)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_hop_carries_the_whole_state(pairs, residual):
    assert pairs[residual, "pipeline"][1]["arrives"] == [ARRIVE[residual]]


@pytest.mark.parametrize(
    ("residual", "message"),
    [("muddformer", "three inputs"), ("deepnorm", "scales a model's weights")],
)
def test_a_residual_that_does_not_fit_is_refused(residual, message):
    from types import SimpleNamespace

    from headwater.integrations.megatron import with_residual

    config = SimpleNamespace(hidden_size=8, num_layers=2, hidden_dropout=0.0)
    model = SimpleNamespace(decoder=SimpleNamespace(config=config))
    with pytest.raises(ValueError, match=message):
        with_residual(model, residual)
    config.hidden_dropout = 0.1
    with pytest.raises(ValueError, match="set hidden_dropout to 0"):
        with_residual(model, "mhc")
