"""Parameters meet the optimizer they should, at the rate of their step."""

import pytest
import torch
from torch import nn

from headwater.models import Decoder, ModelConfig
from headwater.residuals import names
from headwater.runs.settings import OptimSettings
from headwater.train.distributed.fsdp import clip
from headwater.train.optim import build_optimizers, learning_rate, set_learning_rate

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def decoder(residual="standard", **settings) -> Decoder:
    shape = {"vocab_size": 64, "dim": 16, "layers": 2, "heads": 2, "mlp_dim": 32}
    return Decoder(ModelConfig(**shape, residual=residual, **settings))


def groups_of(optimizers) -> list[tuple[str, dict]]:
    """Every group with the name of its optimizer."""
    return [(name, group) for name, kind in optimizers.items() for group in kind.param_groups]


@OPTIMIZERS
@pytest.mark.parametrize("residual", names())
def test_every_parameter_meets_its_optimizer_once(optimizer, residual):
    model = decoder(residual, qk_norm=True)
    homes = {}
    for kind, group in groups_of(build_optimizers(model, OptimSettings(optimizer=optimizer))):
        for parameter in group["params"]:
            assert id(parameter) not in homes
            homes[id(parameter)] = (kind, group["weight_decay"])
    for name, parameter in model.named_parameters():
        hidden = name.startswith("sublayers.") and parameter.ndim == 2
        assert homes[id(parameter)] == ((optimizer, 0.1) if hidden else ("adamw", 0.0)), name


@OPTIMIZERS
def test_the_optimizer_has_the_settings_that_were_asked_for(optimizer):
    """Muon at the scale of AdamW, whose rate and decay it shares: a number of either moves by about 0.2 rates."""
    model = decoder()
    settings = OptimSettings(optimizer=optimizer, lr=0.25, beta1=0.7, beta2=0.8, weight_decay=0.3)
    optimizers = build_optimizers(model, settings)
    groups = groups_of(optimizers)
    decays = {group["name"]: group["weight_decay"] for _, group in groups}
    assert decays == {"matrices": 0.3, "rest": 0.0}
    for kind, group in groups:
        assert group["lr"] == 0.25
        assert kind == "muon" or group["betas"] == (0.7, 0.8)
    if optimizer == "muon":
        matrix = model.sublayers[1].body.gate.weight
        decayed = matrix.detach() * (1 - 0.25 * 0.3)
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers["muon"].step()
        step = (matrix - decayed).square().mean().sqrt().item()
        assert step == pytest.approx(0.2 * 0.25, rel=0.2)


@OPTIMIZERS
def test_the_factor_of_the_queries_is_on_every_rate_of_the_schedule(optimizer):
    settings = OptimSettings(optimizer=optimizer, query_lr=0.1)
    optimizers = build_optimizers(decoder("attnres-full"), settings)
    for rate in (0.5, 0.25):
        set_learning_rate(optimizers, rate)
        rates = {group["name"]: group["lr"] for _, group in groups_of(optimizers)}
        assert rates == {"matrices": rate, "rest": rate, "queries": rate * 0.1}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"final_lr": 0.1},
            {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.55, 99: 0.1},
        ),
        (
            {"schedule": "wsd", "decay": 0.2, "final_lr": 0.0},
            {9: 1, 10: 1, 50: 1, 80: 1, 90: 0.5, 99: 0.05},
        ),
    ],
)
def test_schedules(settings, expected):
    schedule = OptimSettings(lr=1.0, warmup=10, **settings)
    rates = {step: learning_rate(step, 100, schedule) for step in expected}
    assert rates == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("size", [0.25, 40.0])
def test_clipping_lowers_what_is_too_large_and_nothing_else(size):
    """Torch does the same; a norm below the limit stays."""
    torch.manual_seed(0)
    layer, expected = nn.Linear(3, 2), nn.Linear(3, 2)
    for parameter, other in zip(layer.parameters(), expected.parameters()):
        parameter.grad = size * torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 1.5).item()
    clip(layer, norm, 1.5)
    for parameter, other in zip(layer.parameters(), expected.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert (norm < 1.5) == (size < 1)
