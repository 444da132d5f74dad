"""Draws: their order of limits, their shares, their seeds."""

import pytest
import torch

from headwater.generation.next_token import Draw
from headwater.generation.sampling import Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])  # shares 0.64, 0.24, 0.09, 0.03
ROWS = 500


def first_draws(before=(), **settings):
    """The first draws of rows with the same logits and text, each with its own seed."""
    draw = Draw(Sampling(**settings), [before] * ROWS, range(ROWS), 4, CPU)
    return draw(LOGITS.expand(ROWS, -1)).tolist()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.8}, {0, 1}),
        # top_p counts shares after the temperature: at 3 they are 0.38, 0.27, 0.20, 0.14.
        ({"top_p": 0.6, "temperature": 3.0}, {0, 1}),
        ({"top_p": 0.8, "temperature": 0.5}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "repetition_penalty": 3.0, "before": (0, 3, 0)}, {1}),
        ({"temperature": 0.0, "repetition_penalty": 1.5, "before": (0,)}, {0}),
        # A logit below zero grows smaller too.
        ({"repetition_penalty": 40.0, "before": (3,)}, {0, 1, 2}),
    ],
)
def test_limits(settings, tokens):
    assert set(first_draws(**settings)) == tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_flattens_the_shares(temperature):
    share = first_draws(temperature=temperature).count(0) / ROWS
    expected = (LOGITS[0] / temperature).softmax(-1)[0]
    assert share == pytest.approx(expected.item(), abs=0.06)


def test_a_draw_has_the_softmaxs_shares():
    """Chi squared is within four standard deviations of its mean.

    For 20,000 rows with their own seeds, for their next draws, and for many draws of one row.
    """
    logits = torch.randn(200, generator=torch.Generator().manual_seed(4))
    draw = Draw(Sampling(), [[]] * 20000, range(7, 20007), 200, CPU)
    first, second = (draw(logits.expand(20000, 200)) for _ in range(2))
    draw = Draw(Sampling(), [[]], [7], 200, CPU)
    one_row = torch.cat([draw(logits[None]) for _ in range(2000)])
    assert one_row[:2].tolist() == [first[0], second[0]]
    shares = logits.softmax(-1)
    for tokens in (first, second, one_row):
        expected = shares * len(tokens)
        counts = torch.bincount(tokens, minlength=200)
        chi = ((counts - expected).square() / expected).sum()
        assert abs(chi - 199) < 4 * (2 * 199) ** 0.5
    same = (first == second).float().mean()
    assert same == pytest.approx(shares.square().sum().item(), abs=0.004)


def test_what_was_drawn_counts_as_seen():
    sampling = Sampling(temperature=0.0, repetition_penalty=3.0)
    draw = Draw(sampling, [[2]], [0], 4, CPU)
    logits = torch.tensor([[2.0, 1.0, 1.5, 0.9]])
    assert [int(draw(logits)) for _ in range(4)] == [0, 1, 3, 0]
