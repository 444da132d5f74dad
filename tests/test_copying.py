"""The study of copying: what is told twice is told twice, and a model that looks it up is told from one that cannot."""

import math

import pytest
import torch


@pytest.fixture(scope="module")
def study(script):
    return script("studies/copying/run.py")


class Copies:
    """Foretells what came `length` tokens before, but for the first of them, which nothing foretells."""

    def __init__(self, vocabulary: int, length: int):
        self.vocabulary, self.length = vocabulary, length

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, self.vocabulary)
        for place in range(self.length, tokens.shape[1]):
            logits[:, place].scatter_(1, tokens[:, place - self.length + 1, None], 50.0)
        return logits


def test_a_model_that_copies_is_not_surprised_the_second_time(study):
    tokens = study.told_twice(20, 3, 8)
    assert torch.equal(tokens[:, :8], tokens[:, 8:])
    assert len(tokens[:, :8].unique()) > 5
    first, second = study.surprise(Copies(20, 8), tokens)
    assert first == pytest.approx(math.log(20))  # the token that both begin with is in neither
    assert second == pytest.approx(0, abs=1e-6)


def test_one_that_cannot_is_surprised_twice(study):
    first, second = study.surprise(
        lambda tokens: torch.zeros(*tokens.shape, 20), study.told_twice(20, 3, 8)
    )
    assert first == pytest.approx(second) == pytest.approx(math.log(20))
