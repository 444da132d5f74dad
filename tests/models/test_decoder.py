"""The decoder: counts, saving, sampling, limits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinykimi import KIMI
from tinymodels import in_pieces, model_of, tokens_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from headwater.models import SIZES, Decoder, ModelConfig
from headwater.models.attention import Attention, Rotary
from headwater.ops.splitting import Split
from headwater.residuals import names

SHAPE = {"vocab_size": 50, "dim": 32, "layers": 3, "mlp_dim": 64, "context": 16}


def test_parameter_and_flop_counts_are_those_of_the_modules():
    model = Decoder(ModelConfig(**SHAPE, heads=4, kv_heads=2))
    attention, mlp = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 64
    layers, head = 3 * (attention + mlp), 50 * 32
    assert model.parameter_count()["total"] == layers + 2 * head + 7 * 32
    scores, adds = 3 * 2 * 16 * 32, 6 * 2 * 32
    assert model.flops_per_token() == 3 * (2 * layers + 2 * head + scores + adds)


def test_flops_agree_with_pytorchs_counter():
    """FlopCounterMode sees matrix products; attention there is not halved for causality."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Decoder(ModelConfig(**SHAPE, heads=4, kv_heads=4))
    tokens, attention = torch.randint(0, 50, (2, 16)), torch.nn.attention
    plain = attention.sdpa_kernel(attention.SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    causal_half = 3 * 3 * 2 * 16 * 32
    adds = 3 * model.residual.flops_per_token()
    expected = counter.get_total_flops() / 32 - causal_half + adds
    assert model.flops_per_token() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("depth_start", [True, False])
def test_weights_start_at_the_scale_that_they_say(depth_start):
    """Standard deviations of matrices; outputs shrink by sublayers, not by layers."""
    shape = SHAPE | {"vocab_size": 400, "dim": 128, "mlp_dim": 256}
    model = Decoder(ModelConfig(**shape, heads=4, kv_heads=2, depth_start=depth_start))
    weights = {"embedding": model.embedding.weight, "head": model.head.weight}
    expected = {"embedding": 1.0, "head": 0.02}
    for i, sublayer in enumerate(model.sublayers):
        for name, linear in sublayer.body.named_children():
            if isinstance(linear, torch.nn.Linear):
                weights[f"{i}.{name}"] = linear.weight
                shrinks = name == "output" and depth_start
                fan_in = linear.in_features * (6 if shrinks else 1)
                expected[f"{i}.{name}"] = fan_in**-0.5
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.std().item() == pytest.approx(expected[name], rel=0.03), name


def test_a_decoder_is_its_formula():
    """Norms with a weight and a large eps, SwiGLU, the head: written out around attention."""
    model = model_of("standard", scatter=True, layers=2, norm_eps=0.5)
    rotary = model.rotary(0, 12)

    def normed(x, norm):
        square = x.square().mean(-1, keepdim=True)
        return x / (square + 0.5).sqrt() * norm.weight

    with torch.no_grad():
        x = model.embedding.weight[tokens_of()]
        for i in (0, 2):
            attention, mlp = model.sublayers[i : i + 2]
            x = x + attention.body(normed(x, attention.norm), rotary)[0]
            inner, body = normed(x, mlp.norm), mlp.body
            gate, up = inner @ body.gate.weight.T, inner @ body.up.weight.T
            x = x + (gate * gate.sigmoid() * up) @ body.output.weight.T
        expected = normed(x, model.norm) @ model.head.weight.T
        assert_close(model(tokens_of()), expected)


def test_attention_is_its_formula():
    """Grouped queries, norms of queries and keys before their rotation, in complex numbers."""
    torch.manual_seed(0)
    settings = {"rope_theta": 50.0, "qk_norm": True, "norm_eps": 0.1}
    config = ModelConfig(**SHAPE | {"context": 8}, heads=4, kv_heads=2, **settings)
    attention = Attention(config).double()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    rotary = Rotary(config.head_dim, 8, config.rope_theta)(0, 6)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter))

        def turned(head, t, norm):
            size = (head.square().mean() + 0.1).sqrt()
            normed = head / size * norm.weight
            angle = t * 50.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
            pairs = torch.complex(normed[:4], normed[4:])
            pairs = pairs * torch.polar(torch.ones_like(angle), angle)
            return torch.cat((pairs.real, pairs.imag))

        def head_of(linear, t, h):
            return (linear.weight @ x[0, t]).split(8)[h]

        def keys_and_values(t, h):
            """Those that a head of the queries sees at token t; two heads share them."""
            keys, values = [], []
            for s in range(t + 1):
                key = head_of(attention.key, s, h // 2)
                keys.append(turned(key, s, attention.key_norm))
                values.append(head_of(attention.value, s, h // 2))
            return torch.stack(keys), torch.stack(values)

        out = torch.zeros(6, 4, 8, dtype=torch.float64)
        for t in range(6):
            for h in range(4):
                q = turned(head_of(attention.query, t, h), t, attention.query_norm)
                keys, values = keys_and_values(t, h)
                out[t, h] = (keys @ q / 8**0.5).softmax(0) @ values
        y, _ = attention(x, rotary)
        expected = out.flatten(1) @ attention.output.weight.T
    assert_close(y[0], expected, atol=1e-5, rtol=1e-5)


def test_parts_of_a_product_are_put_together_by_one_node():
    """The gradient is the same, and the compiler does not look into the node."""
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)

    def gradient(x, split):
        first, second, _ = split(x, [5, 3, 2])
        loss = first.sin().sum() + second.cos().sum()
        return torch.autograd.grad(loss, x)[0]

    traced = make_fx(lambda x: gradient(x, Split.apply))(x)
    expected = gradient(x, lambda x, sizes: x.split(sizes, -1))
    compiled = gradient(x, torch.compile(Split.apply, backend="aot_eager"))
    for result in (gradient(x, Split.apply), traced(x), compiled):
        assert_close(result, expected, rtol=0, atol=0)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert targets.count("headwater.join_parts.default") == 1
    assert "aten.cat.default" not in targets


@pytest.mark.parametrize(("wide", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_under_autocast_the_stream_has_the_sublayers_dtype_unless_fp32_is_asked_for(wide, dtype):
    model, tokens, dtypes = model_of("attnres-block:block=4", fp32_stream=wide), tokens_of(), set()

    def note(module, inputs, output):
        dtypes.add(inputs[0].dtype)

    for sublayer in model.sublayers:
        sublayer.body.register_forward_hook(note)
    rotary = model.rotary(0, tokens.shape[1])
    with torch.autocast("cpu", torch.bfloat16):
        state = model.run(model.begin(tokens), 0, 8, rotary)
        assert model(tokens).dtype == torch.bfloat16
    assert len(state) > 2
    assert {source.dtype for source in state} == dtypes == {dtype}
    assert model.begin(tokens)[0].dtype == torch.float32


@pytest.mark.parametrize("pattern", ["attention", "attention:shortswa", "kda:mla"])
def test_what_was_built_on_the_meta_device_needs_no_more_than_its_weights(pattern):
    """Loops with FSDP2 do this. Rotary tables and routers' counts are in no checkpoint."""
    settings = KIMI | {"layers": 2, "pattern": pattern, "shortswa": 2}
    model, tokens = model_of("standard", **settings), tokens_of(2, 8)
    with torch.device("meta"):
        empty = model_of("standard", **settings)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    buffers, expected = (dict(module.named_buffers()) for module in (empty, model))
    assert_close(buffers, expected, rtol=0, atol=0)
    assert_close(empty(tokens), model(tokens), rtol=0, atol=0)


def test_a_decoder_on_the_meta_device_computes_shapes():
    with torch.device("meta"):
        assert model_of("standard")(tokens_of().to("meta")).is_meta


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_are_valid(size):
    assert ModelConfig.named(size, vocab_size=257).sublayers == 2 * SIZES[size]["layers"]


def test_named_sizes_stay_the_size_that_they_are():
    """Millions of parameters between embedding and head, and the context."""
    expected = {
        "nano": (0.185, 128), "tiny": (1.477, 256), "deep": (1.035, 128), "small": (35.402, 1024),
        "medium": (151.033, 2048), "large": (704.731, 4096), "xl": (1132.562, 4096),
        "ladder-2m": (2.412, 1024), "ladder-7m": (7.084, 1024), "ladder-16m": (16.067, 1024),
        "ladder-43m": (42.486, 1024),
    }  # fmt: skip

    for name, (millions, context) in expected.items():
        with torch.device("meta"):
            model = Decoder(ModelConfig.named(name, vocab_size=1))
        inner = model.parameter_count()["total"] - 2 * model.config.dim
        assert round(inner / 1e6, 3) == millions, name
        assert model.config.context == context, name


def test_tied_head_is_one_tensor_before_and_after_saving(tmp_path):
    model = model_of("attnres-block", tie_embeddings=True, scatter=True)
    model.save(tmp_path)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = Decoder.load(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded(tokens_of()), model(tokens_of()))


def test_a_saved_model_keeps_its_block_where_the_default_changes(tmp_path, monkeypatch):
    model = model_of("attnres-block", scatter=True)
    model.save(tmp_path)
    monkeypatch.setattr("headwater.residuals.attention.default_block", lambda sublayers: 3)
    assert model_of("attnres-block").residual.block == 3
    loaded = Decoder.load(tmp_path)
    assert loaded.residual.block == model.residual.block == 2
    assert torch.equal(loaded(tokens_of()), model(tokens_of()))


def test_a_file_that_does_not_fit_is_named(tmp_path):
    model = model_of("standard")
    model.save(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()  # which would notice that the file is another
    weights = load_file(tmp_path / "model.safetensors")
    weights["norm.weight"] = torch.ones(5)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is \(32,\) in the model and \(5,\) in the file"):
        Decoder.load(tmp_path)
    weights["extra"] = weights.pop("norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\], not expected \['extra'\]"):
        Decoder.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "widht": 3}))
    with pytest.raises(ValueError, match="unknown setting 'widht'"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize("setting", [("qk_norm", True), ("kv_heads", 4), ("tie_embeddings", True)])
def test_cached_logits_equal_uncached_logits_chunk_by_chunk(setting):
    model, tokens = model_of("standard", layers=2, **dict([setting])), tokens_of(length=20)
    pieces = in_pieces(model, tokens, 7, 1, 7, 5)
    assert_close(pieces, model(tokens), atol=1e-5, rtol=1e-5)


def test_a_token_never_sees_its_future():
    model, tokens = model_of("attnres-full", scatter=True), tokens_of(length=12)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 48
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])


@torch.no_grad()
def test_what_the_head_sees_of_the_last_token_alone():
    two_phases = "attnres-block:block=3,schedule=two-phase,backend=reference"
    for spec in (*names(), two_phases, "attnres-full:window=2,heads=2"):
        model, lengths = model_of(spec, scatter=True, layers=2), []
        whole = model.hidden(tokens_of())

        def note(_, inputs, lengths=lengths):
            lengths.append(inputs[0].shape[1])

        model.norm.register_forward_pre_hook(note)
        last = model.hidden(tokens_of(), last=True)
        assert_close(last, whole[:, -1:], atol=1e-5, rtol=1e-5, msg=spec)
        if spec.startswith(("attnres", "standard")):
            assert lengths == [1], spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "heads must divide dim"),
        ({"dim": 36, "heads": 4}, "even number of channels"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1 in a model; got 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        model_of("standard", **settings)


def test_windows_that_do_not_fit_are_refused():
    for window in (1, 33):
        with pytest.raises(ValueError, match=rf"shortswa must be .*; got {window}"):
            model_of("standard", shortswa=window)
