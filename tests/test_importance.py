"""The study of weights and importance: its table is of what `headwater.inspect` computes."""

import pytest
import torch
from tinymodels import model_of

import headwater


@pytest.fixture(scope="module")
def study(script):
    return script("studies/importance/run.py")


def test_means_are_over_the_reads_that_rank_something(study):
    found = study.summary([1.0, None, 0.5, 0.0, -1.0])
    assert found == {"all": 0.125, "first": 1.0, "middle": 0.25, "last": -1.0}


def test_it_sets_a_weight_beside_the_change_of_the_loss(study):
    model = model_of("attnres-full", scatter=True)
    windows = torch.randint(
        model.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0)
    )
    found = study.measure(model, windows)
    seen = [headwater.inspect(model, window, removals="pairs") for window in windows]
    place = seen[0].pairs.index((3, 1))
    for one, weight, size, change in zip(seen, *found):
        assert weight[3, 1] == pytest.approx(float(one.mixing[3, 1].mean()))
        assert size[3, 1] == pytest.approx(float((one.mixing[3, 1] * one.source_size[1]).mean()))
        assert change[3, 1] == pytest.approx(float(one.removed_at.loss[place].mean()))


def test_changes_are_means_over_windows_and_their_halves_are_every_other(study):
    """One read of three sources: over all windows changes go with the weights; on every other alone they do not."""
    read = torch.zeros(4, 3, 3)
    weights, sizes, changes = read.clone(), read.clone(), read.clone()
    weights[:, 2], sizes[:, 2] = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.5, 0.3, 0.2])
    changes[::2, 2], changes[1::2, 2] = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.0, 4.0, 8.0])
    found = study.correlations(study.Measured(weights, sizes, changes))
    assert found == {
        "weights": [pytest.approx(1)],
        "sizes": [pytest.approx(-1)],
        "halves": [pytest.approx(-1)],
    }
