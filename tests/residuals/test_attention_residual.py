"""Promises of the mathematics of Attention Residuals, beside what its formula says of each read."""

import pytest
import torch
from tinymodels import gradients_of, model_of, tokens_of
from torch.testing import assert_close

from headwater import param_groups
from headwater.models import Decoder, ModelConfig
from headwater.residuals import build


@pytest.mark.parametrize("spec", ["attnres-full", "attnres-block:block=3", "attnres-block:block=8"])
@pytest.mark.parametrize("layers", [4, 24])
def test_zero_queries_give_the_plain_network(spec, layers):
    shape = {"vocab_size": 48, "layers": layers, "context": 16}

    def results(residual):
        torch.manual_seed(0)
        model = Decoder(ModelConfig.named("deep", **shape, residual=residual))
        return gradients_of(model, tokens_of())

    expected, shared = results("standard")
    logits, gradients = results(spec)
    assert_close(logits, expected, atol=1e-4, rtol=0)
    for name, gradient in shared.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("spec", ["attnres-full", "attnres-block:block=3"])
def test_the_final_read_takes_part(spec):
    """The head would else see only the newest source: another function at any start."""
    model, tokens = model_of(spec), tokens_of()
    complete = model(tokens)
    model.residual.end = lambda state, norm=None: norm(state[-1])
    assert (model(tokens) - complete).abs().max() > 1e-2


def test_the_default_gives_about_eight_blocks():
    for sublayers in (16, 24, 48, 54, 100):
        assert 6 <= build("attnres-block", 16, sublayers).num_sources(sublayers) - 1 <= 8


@pytest.mark.parametrize(("scale", "power"), [("root", 0.5), ("width", 1)])
def test_under_adam_a_scale_of_the_logits_is_a_factor_on_the_queries_rate(scale, power):
    """The study therefore sweeps only the factor."""

    def trained(spec, query_lr):
        model, tokens = model_of(spec), tokens_of()
        groups = param_groups(model, lr=1e-2, query_lr=query_lr)
        optimizer = torch.optim.AdamW(groups, eps=1e-20)
        for _ in range(8):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        return model(tokens).detach()

    width = model_of("attnres-full").config.dim
    scaled = trained(f"attnres-full:scale={scale}", 1.0)
    expected = trained("attnres-full", width**-power)
    assert_close(scaled, expected, atol=1e-4, rtol=0)
    assert (scaled - trained("attnres-full", 1.0)).abs().max() > 1e-2
