"""The study of lookups in a chain: its prompts are what they say, and a run gives an accuracy for each length."""

from dataclasses import replace

import pytest
import torch
from tinymodels import model_of


@pytest.fixture(scope="module")
def hops(script):
    return script("studies/hops/run.py")


def test_answers_follow_the_links_that_were_told(hops):
    task = hops.Task(nodes=7, hops=4, questions=5)
    tokens, answers, counts = hops.prompts(task, 20, torch.Generator().manual_seed(0))
    assert tokens.shape == (20, task.context)
    assert set(counts.flatten().tolist()) == {1, 2, 3, 4}
    for row, (line, right, count) in enumerate(
        zip(tokens.tolist(), answers.tolist(), counts.tolist())
    ):
        told, asked = line[:7], line[7:]
        links = dict(divmod(token, 7) for token in told)
        seen = [0]
        for _ in range(7):
            seen.append(links[seen[-1]])
        assert sorted(seen) == [0, *range(7)], f"one ring through all nodes, row {row}"
        for number, token in enumerate(asked):
            words, node = divmod(token, 7)
            assert words == 7 + count[number] - 1
            assert token < task.vocabulary
            for _ in range(count[number]):
                node = links[node]
            assert node == right[number]


def test_an_answer_is_read_where_its_question_is_and_of_nodes_alone(hops):
    task = hops.Task(nodes=3, hops=2, questions=4)
    places = torch.arange(task.context).expand(1, -1)

    class Model:
        def hidden(self, tokens):
            return tokens[..., None].float()

        def head(self, hidden):
            return hidden * torch.ones(task.vocabulary)

    found = hops.answers_of(Model(), task, places)
    assert found[0, :, 0].tolist() == [3, 4, 5, 6]
    assert found.shape == (1, 4, 3)


def test_a_run_sees_the_same_prompts_with_any_residual(hops):
    """At first these residuals predict alike, so that equal prompts show in equal losses."""
    task = replace(hops.SMALL, layers=1, dim=32, steps=3, batch=2, questions=2, lr=0.0, every=1)
    plain = hops.run(task, "standard", 3, "cpu")
    block, other = hops.run(task, "attnres-block", 3, "cpu"), hops.run(task, "standard", 4, "cpu")
    assert len(block["accuracy"]) == task.hops
    assert block["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert len(plain["losses"]) == 3
    assert min(abs(a - b) for a, b in zip(plain["losses"], other["losses"])) > 1e-3


def test_a_seed_draws_prompts_of_its_own(hops):
    first, again, other = (
        hops.Training(model_of("standard"), hops.SMALL, seed, "cpu").tokens for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
