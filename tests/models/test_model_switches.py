"""Switches of the decoder that are not residuals: ShortSWA sublayers and value residual."""

from functools import partial

import pytest
import torch
from tinymodels import DIM, LAYERS, gradients_of, model_of, tokens_of, without_gradient
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwater.generation.generate import generate
from headwater.models import Decoder
from headwater.models.window import window_attention, window_mask
from headwater.residuals import names

VALUES = {"value_residual": True}
SWITCHES = [{"shortswa": 3}, VALUES, {"shortswa": 4} | VALUES]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("spec", ["standard", "attnres-block:block=3", "muddformer", "mhc"])
def test_gradients_checkpointing_and_saving(switches, spec, tmp_path):
    model, tokens = model_of(spec, scatter=True, **switches), tokens_of()
    logits, gradients = gradients_of(model, tokens)
    assert without_gradient(gradients) == []
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(tokens), logits)
    model.around = partial(checkpoint, use_reentrant=False)
    again, recomputed = gradients_of(model, tokens)
    assert torch.equal(again, logits)
    assert_close(recomputed, gradients, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("spec", ["standard", "deepcrossattention"])
def test_cached_decoding(switches, spec):
    model, prompt = model_of(spec, scatter=True, **switches), tokens_of(length=5)
    text = generate(model, prompt, 16)
    assert torch.equal(generate(model, prompt, 16, use_cache=False), text)


def test_a_window_s_cache_hands_out_only_what_the_next_token_sees():
    model, tokens = model_of("standard", scatter=True, shortswa=3), tokens_of(length=9)
    cache = model.new_cache(len(tokens))
    sizes = (6, 1, 1, 1)
    pieces = [model(piece, cache) for piece in tokens.split(sizes, 1)]
    assert_close(torch.cat(pieces, 1), model(tokens), atol=1e-5, rtol=1e-4)
    token = torch.zeros(2, 2, 1, 8)
    keys, _ = cache[0].append(token, token)
    assert keys.shape[2] == 3


# These two divide by the length of an output, which here starts at zero.
DIVIDE = {"elc-bert", "vertical-attention"}


@pytest.mark.parametrize("spec", sorted({*names()} - DIVIDE))
def test_every_residual_takes_three_sublayers_a_layer(spec):
    model = model_of(spec, shortswa=3)
    assert model.config.kinds == ("shortswa", "attention", "mlp") * 4
    assert model(tokens_of()).isfinite().all()


def test_a_short_window_begins_as_nothing():
    plain, tokens = model_of("standard"), tokens_of()
    model = model_of("standard", shortswa=4)
    weights = {}
    for name, value in plain.state_dict().items():
        head, *rest = name.split(".")
        if head == "sublayers":
            layer, place = divmod(int(rest[0]), 2)
            number = 3 * layer + 1 + place  # behind the layer's short attention
            name = ".".join(("sublayers", str(number), *rest[1:]))
        weights[name] = value
    model.load_state_dict(weights, strict=False)
    assert torch.equal(model(tokens), plain(tokens))


def test_a_short_window_sees_only_its_tokens():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    out = window_attention(q, k, v, 3)
    for t in range(7):
        window = slice(max(0, t - 2), t + 1)
        scores = q[..., [t], :] @ k[..., window, :].mT
        weights = (scores / 2).softmax(-1)
        expected = weights @ v[..., window, :]
        assert_close(out[..., [t], :], expected, atol=1e-6, rtol=1e-6)
    mask = window_mask(2, 4, 2).int()
    assert mask.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_value_residual_mixes_the_first_attention_s_values():
    torch.manual_seed(0)
    model, tokens = model_of("standard", value_residual=True), tokens_of()
    plain = model_of("standard")
    plain.load_state_dict(model.state_dict(), strict=False)
    later = [model.sublayers[i].body for i in (2, 4, 6)]
    assert model.sublayers[0].body.value_mix is None
    assert all(body.value_mix.tolist() == [0.5, 0.5] for body in later)
    assert (model(tokens) - plain(tokens)).abs().max() > 1e-4

    def mix(first, second):
        for body in later:
            body.value_mix.data = torch.tensor([first, second])

    mix(0.0, 1.0)
    assert_close(model(tokens), plain(tokens), atol=1e-6, rtol=1e-6)
    mix(1.0, 0.0)
    for body in later:
        body.value.weight.data.fill_(float("nan"))
    assert not model(tokens).isfinite().any()  # 0 x nan: the layer's values are there, weighted


def test_deepnorm_starts_its_sublayers_smaller():
    def norms(spec):
        torch.manual_seed(0)
        sublayers = model_of(spec).sublayers
        attention, mlp = sublayers[0].body, sublayers[1].body
        scaled = (attention.value, attention.output, mlp.gate, mlp.up, mlp.output)
        norms = [linear.weight.norm() for linear in scaled]
        return torch.stack(norms), attention.query.weight.norm()

    (plain, query), (small, same) = norms("standard"), norms("deepnorm")
    assert_close(small, plain * (8 * 4) ** -0.25)
    assert torch.equal(query, same)


def test_flops_count_the_window():
    plain = model_of("standard", kv_heads=4)
    windowed = model_of("standard", kv_heads=4, shortswa=8)
    matrices, adds = 2 * 4 * DIM * DIM, 2 * DIM
    # In a text of four tokens a window has no more than four.
    for tokens, width in ((None, 8), (4, 4)):
        difference = windowed.flops_per_token(tokens) - plain.flops_per_token(tokens)
        assert difference == 3 * LAYERS * (matrices + 4 * width * DIM + adds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention runs on a GPU")
@pytest.mark.parametrize(
    ("length", "window"),
    [(64, 4), (300, 128), (513, 64)],  # below, beside and above its blocks
)
def test_flex_attention_equals_masked_attention(length, window):
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 32, dtype=torch.float64) for heads in (4, 2, 2)]
    along = torch.randn(2, 4, length, 32, dtype=torch.float64)

    def run(device, dtype):
        q, k, v = leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = window_attention(q, k, v, window)
        return [
            x.double().cpu()
            for x in (out.detach(), *torch.autograd.grad(out, leaves, along.to(out)))
        ]

    for flex, masked in zip(run("cuda", torch.float32), run("cpu", torch.float64)):
        # The kernels multiply in TF32
        assert_close(flex, masked, atol=5e-3, rtol=5e-3)
