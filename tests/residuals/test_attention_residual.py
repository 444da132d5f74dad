"""Promises of the mathematics of Attention Residuals."""

from functools import partial

import pytest
import torch
from tinymodels import gradients_of, model_of, tokens_of
from tinymodels import scattered as scattered_residual

from headwater import param_groups
from headwater.models import Decoder
from headwater.ops import depth_attention
from headwater.residuals import build, mixing
from headwater.residuals.record import replay

scattered = partial(scattered_residual, scale=1.0)


@pytest.mark.parametrize("spec", ["attnres-full", "attnres-block:block=3", "attnres-block:block=8"])
@pytest.mark.parametrize("layers", [4, 24])
def test_zero_queries_give_the_plain_network(spec, layers):
    from headwater.models import ModelConfig

    def network(residual):
        torch.manual_seed(0)
        return Decoder(
            ModelConfig.named("deep", vocab_size=48, layers=layers, context=16, residual=residual)
        )

    plain, model = network("standard"), network(spec)
    (expected, shared), (logits, gradients) = (gradients_of(m, tokens_of()) for m in (plain, model))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    for name, gradient in shared.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("spec", ["attnres-full", "attnres-block:block=3"])
def test_the_final_read_takes_part(spec):
    """The head would else see only the newest source: another function at any start."""
    model, tokens = model_of(spec), tokens_of()
    complete = model(tokens)
    model.residual.end = lambda state, norm=None: norm(state[-1])
    assert (model(tokens) - complete).abs().max() > 1e-2


def test_every_read_is_depth_attention_over_its_sources():
    """Block reads written out from the definition: finished block sums, then the running sum."""
    residual = scattered("attnres-block:block=3")
    sources = list(torch.randn(9, 2, 5, 16))
    reads = replay(residual, sources)
    for i in range(9):
        outputs = sources[1 : i + 1]
        blocks = [sum(outputs[j : j + 3]) for j in range(0, len(outputs), 3)]
        if i == 0:
            assert torch.equal(reads[0], sources[0])
            continue
        parameters = residual.reads[str(i)]
        expected = depth_attention([sources[0], *blocks], parameters.query, parameters.key_weight)
        torch.testing.assert_close(reads[i], expected)


def test_blocks_of_one_are_full_attention_residuals():
    full, block = (
        scattered("attnres-full", sublayers=6),
        scattered("attnres-block:block=1", sublayers=6),
    )
    sources = list(torch.randn(7, 2, 16))
    for one, other in zip(replay(full, sources), replay(block, sources)):
        assert torch.equal(one, other)


def test_full_rows_are_softmax_weights_and_block_rows_are_shared_within_a_block():
    sources = list(torch.randn(9, 3, 16))
    full = mixing(scattered("attnres-full", sublayers=8), sources)
    torch.testing.assert_close(full.sum(1), torch.ones(9, 3))
    block = mixing(scattered("attnres-block:block=3", sublayers=8), sources)
    last = block[-1]
    assert torch.equal(last[1], last[2])
    assert torch.equal(last[4], last[6])
    assert not torch.equal(last[3], last[4])


def test_a_window_keeps_the_embedding_and_the_newest():
    matrix = mixing(
        scattered("attnres-full:window=2", sublayers=6), list(torch.randn(7, 1, 16))
    ).squeeze(-1)
    assert torch.equal((matrix[-1] != 0).nonzero().flatten(), torch.tensor([0, 5, 6]))


def test_the_default_gives_about_eight_blocks():
    for sublayers in (16, 24, 48, 54, 100):
        assert 6 <= build("attnres-block", 16, sublayers).num_sources(sublayers) - 1 <= 8


def test_the_first_read_has_nothing_to_learn():
    assert "0" not in build("attnres-full", 16, 4).reads
    assert set(build("attnres-full", 16, 4).reads) == {"1", "2", "3", "4"}


def test_weights_are_what_the_read_used():
    residual = scattered("attnres-block:block=2", sublayers=4)
    state = tuple(torch.randn(3, 2, 5, 16))
    weights = residual.weights(state, 3)
    assert weights.shape == (3, 2, 5, 1)
    torch.testing.assert_close((weights * torch.stack(state)).sum(0), residual.read(state, 3)[0])


def test_queries_start_as_wide_as_they_are_asked_to():
    for spec, expected in (
        ("attnres-full", 0.0),
        ("attnres-full:start=0.5", 0.5),
        ("attnres-full:scale=gain", 1.0),
    ):
        queries = torch.cat([read.query for read in build(spec, 512, 8).reads.values()])
        assert queries.std().item() == pytest.approx(expected, rel=0.05), spec


@pytest.mark.parametrize(("scale", "power"), [("root", 0.5), ("width", 1)])
def test_under_adam_a_scale_of_the_logits_is_a_factor_on_the_queries_rate(scale, power):
    """The study therefore sweeps only the factor."""

    def trained(spec, query_lr):
        model, tokens = model_of(spec), tokens_of()
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, query_lr=query_lr), eps=1e-20)
        for _ in range(8):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        return model(tokens).detach()

    width = model_of("attnres-full").config.dim
    scaled = trained(f"attnres-full:scale={scale}", 1.0)
    torch.testing.assert_close(scaled, trained("attnres-full", width**-power), atol=1e-4, rtol=0)
    assert (scaled - trained("attnres-full", 1.0)).abs().max() > 1e-2
