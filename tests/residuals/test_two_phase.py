"""The two-phase schedule on its references: the same network as with one pass per read, on any device."""

import pytest
import torch

from headwater.models import Decoder, ModelConfig
from headwater.models.generate import generate
from headwater.residuals import build, record
from headwater.residuals.attention import AttentionResidual
from headwater.residuals.base import weights_held

SPECS = ["attnres-block:block=3", "attnres-block:block=8", "attnres-full"]  # 3: the last block is partial


@pytest.fixture
def two_phases(monkeypatch):
    """A switch: models run in two phases, over the references, from the moment it is called."""
    one_pass = AttentionResidual.begin

    def begin(self, x):
        if self.two_phase is None or weights_held():
            return one_pass(self, x)
        self.two_phase.reference = True
        return self.two_phase.begin(x, self._folded())

    return lambda: monkeypatch.setattr(AttentionResidual, "begin", begin)


def model_of(spec):
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "dim": 24, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 32, "context": 32}
    model = Decoder(ModelConfig(**shape, residual=spec))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    return model


def results_of(model, tokens):
    model.zero_grad()
    logits = model(tokens)
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_the_same_network(spec, two_phases):
    model, tokens = model_of(spec), torch.randint(0, 40, (2, 7))
    expected, text = results_of(model, tokens), generate(model, tokens, 9, temperature=0.0)
    two_phases()
    assert len(model.residual.begin(torch.zeros(2, 24))) > 1
    for mine, other in zip(results_of(model, tokens), expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert torch.equal(generate(model, tokens, 9, temperature=0.0), text)


@pytest.mark.parametrize("spec", SPECS)
def test_a_record_shows_the_same_reads_and_weights(spec, two_phases):
    model, tokens = model_of(spec), torch.randint(0, 40, (1, 5))
    with torch.no_grad(), record(model.residual) as one:
        model(tokens)
    two_phases()
    with torch.no_grad(), record(model.residual) as two:
        model(tokens)
    for mine, other in zip([*two.reads, *two.weights], [*one.reads, *one.weights], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_a_settled_state_can_be_read_on(spec, two_phases):
    """A pipeline stage sends sources alone; the next stage continues in one pass."""
    residual = build(spec, 16, 8)
    for p in residual.parameters():
        torch.nn.init.normal_(p, std=0.3)
    outputs = torch.randn(9, 2, 16)

    def run(settle_at):
        state = residual.begin(outputs[0])
        for i in range(8):
            if i == settle_at:
                state = residual.settle(state, i)
                assert len(state) == residual.num_sources(i)
            _, state = residual.read(state, i)
            state = residual.write(state, i, outputs[i + 1])
        return residual.end(state)

    two_phases()
    whole = run(None)
    for i in range(8):
        torch.testing.assert_close(run(i), whole, atol=1e-5, rtol=1e-4)
