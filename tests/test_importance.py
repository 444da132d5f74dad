"""The study of weights and importance: ranks are ranks, and its table is of what `headwater.inspect` computes."""

import pytest
import torch
from tinymodels import model_of

import headwater


@pytest.fixture(scope="module")
def study(script):
    return script("studies/importance/run.py")


def test_ranks_and_their_correlation(study):
    assert study.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert study.spearman([1, 2, 3], [10, 1000, 20000]) == pytest.approx(1.0)
    assert study.spearman([1, 2, 3, 4], [4, 3, 1, 2]) == pytest.approx(-0.8)
    assert study.spearman([1, 1, 1], [1, 2, 3]) is None


def test_means_are_over_the_reads_that_rank_something(study):
    found = study.summary([1.0, None, 0.5, 0.0, -1.0])
    assert found == {"all": 0.125, "first": 1.0, "middle": 0.25, "last": -1.0}


def test_it_sets_a_weight_beside_the_change_of_the_loss(study):
    model = model_of("attnres-full", scatter=True)
    windows = torch.randint(model.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
    weights, changes = study.measure(model, windows)
    seen = [headwater.inspect(model, window, removals="pairs") for window in windows]
    place = seen[0].pairs.index((3, 1))
    assert weights[3, 1] == pytest.approx(sum(float(s.mixing[3, 1].mean()) for s in seen) / 2)
    assert changes[3, 1] == pytest.approx(sum(float(s.removed_at.loss[place].mean()) for s in seen) / 2)
    assert len(study.by_read(weights, changes)) == len(weights) - 2
