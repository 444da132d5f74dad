"""Attention Residuals in flash-linear-attention's own models, beside ours reading their checkpoints: equal logits.

On a GPU its fused operators run. On a CPU its rotary and SwiGLU kernels run under Triton's interpreter and the one that
asks for CUDA, the depth read, is its own reference. FlashAttention, which it imports, is PyTorch's attention in both.
Its mixers run on no CPU: there `stand_in`, with the mixer's own parameters, takes their place in its model and in ours.
"""

import functools
import json
import sys

import pytest
import torch
from tinyhf import VOCAB, agree, load, logits, tiny_model, tokens
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headwater.errors import UserError
from headwater.hf import FLA, convert, revert, to_release
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.layouts import FLA_TYPES
from headwater.hf.convert.norms import foldable
from headwater.hf.convert.registration import stub
from headwater.hf.formats.fla import DEFAULTS, read_fla
from headwater.hf.formats.remote import write_remote_code

transformer = pytest.importorskip(
    "fla.models.transformer", reason="needs flash-linear-attention, an extra of `dev`"
)
modeling = pytest.importorskip("fla.models.transformer.modeling_transformer")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned_fla")]
COMMON = {"vocab_size": VOCAB, "use_cache": False, "initializer_range": 0.2}
SHAPE = {
    **COMMON, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 4, "num_kv_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
NEAR = {"rtol": 1e-4, "atol": 1e-4}
IDS = tokens().to(DEVICE)


def attention(q, k, v, causal, window_size):
    assert causal
    assert window_size == (-1, -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.fixture(autouse=True)
def runs_here(monkeypatch):
    import fla.layers.attn
    from fla.ops.attnres import naive_attnres
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(fla.layers.attn, "flash_attn_func", attention)
    if DEVICE == "cpu":
        monkeypatch.setattr(modeling, "fused_attnres", naive_attnres)
        # The interpreter has no clock
        monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0])


def scattered(config):
    """A random model, its queries, key weights and norms off their start; kernels fuse norms only on a GPU."""
    torch.manual_seed(0)
    config.fuse_norm = config.fuse_swiglu = DEVICE == "cuda"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval().to(DEVICE)


def fla_model(**options):
    return scattered(transformer.TransformerConfig(**{**SHAPE, **options}))


def read(model, config=None):
    return read_fla(model.state_dict(), config or model.config.to_dict()).to(DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {"attnres_block_size": 2, "norm_eps": 1e-3},  # an eps so large that one out of place shows
        {"attnres_block_size": 4, "qkv_bias": True},
        {"attnres_block_size": 1, "qk_norm": True, "norm_eps": 1e-5},
        # The last block is partial
        {"attnres_block_size": 6, "tie_word_embeddings": True, "rope_theta": 500.0},
        {"attnres_block_size": 16, "num_kv_heads": None},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_its_model_and_ours_agree(options):
    original = fla_model(**options)
    expected = logits(original, IDS)
    assert expected.std() > 0.1
    model = read(original)
    torch.testing.assert_close(logits(model, IDS), expected, **NEAR)
    blank = transformer.TransformerForCausalLM(original.config).eval()
    weights = to_release(model.state_dict(), FLA)
    # A file of tied weights holds them once.
    blank.load_state_dict(weights, strict=not options.get("tie_word_embeddings"))
    torch.testing.assert_close(logits(blank.to(DEVICE), IDS), expected)


def test_a_config_may_leave_out_its_defaults():
    original = fla_model(attnres_block_size=2)
    whole = original.config.to_dict()
    defaults = transformer.TransformerConfig().to_dict()
    assert {name: defaults[name] for name in DEFAULTS} == DEFAULTS
    short = {name: value for name, value in whole.items() if value != defaults.get(name)}
    assert not {"pad_token_id", "qk_norm", "qkv_bias", "window_size", "norm_eps"} & short.keys()
    models = [read(original, config) for config in (whole, short)]
    assert models[0].config.to_dict() == models[1].config.to_dict()
    assert torch.equal(*(logits(model, IDS) for model in models))


@pytest.mark.parametrize(
    "options", [{"window_size": 8}, {"hidden_act": "powlu"}, {"qk_norm": True}]
)
def test_what_transformers_cannot_compute_is_refused(options):
    config = transformer.TransformerConfig(**SHAPE, attnres_block_size=2, **options).to_dict()
    name, value = next(iter(options.items()))
    with pytest.raises(UserError, match=f"{name}={value} has no counterpart"):
        read_fla({}, config)


def test_types_that_it_registers_over_transformers_do_not_disturb_ours(tmp_path):
    """Importing fla gives the type `bitnet` to a config of its own."""
    model, plain = tiny_model("bitnet"), tiny_model("bitnet")
    assert type(model.config) is not CONFIG_MAPPING["bitnet"]
    convert(model)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert type(stub("bitnet").from_dict(settings)) is type(model.config)
    assert agree(load(tmp_path), plain)


OTHERS = [name for name in FLA_TYPES if name != "transformer"]
WIDE = {**COMMON, "hidden_size": 64, "num_hidden_layers": 3}
SIZES = {  # where heads of the default width, or of none, do not fit
    "hgrn": {"intermediate_size": 48},
    "hgrn2": {"num_heads": 2, "expand_ratio": 32, "intermediate_size": 48},
    "nsa": {"num_heads": 16, "num_kv_heads": 1, "intermediate_size": 48},
    "log_linear_mamba2": {"num_heads": 2, "head_dim": 64, "state_size": 16},
    "samba": {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 4}},
}


def other_model(kind, **options):
    """One of fla's models that is no Llama."""
    sizes = {**WIDE, **SIZES.get(kind, {"num_heads": 2, "intermediate_size": 48})}
    return scattered(CONFIG_MAPPING[kind](**{**sizes, "attnres_block_size": 2, **options}))


def stand_in(forward):
    """A mixer that a CPU runs: the mean of the tokens so far, through the mixer's own output projection and back; and
    what else the mixer is given. Its arguments and results are the mixer's."""

    @functools.wraps(forward)
    def run(self, hidden_states, past_key_values=None, lower_bound=None, **kwargs):
        assert kwargs.pop("attnres_states", None) is None
        weight = next(
            p for name, p in self.named_parameters() if name.split(".")[0] in ("o_proj", "out_proj")
        )
        counts = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        y = hidden_states.cumsum(1) / counts @ weight @ weight.T
        if lower_bound is not None:
            y = y + lower_bound.mean()
        return (
            (y, None, past_key_values, y)
            if type(self).__name__ == "MomAttention"
            else (y, None, past_key_values)
        )

    return run


def norm(self, x, residual=None, prenorm=False):
    """fla's, which is a kernel."""
    x = x if residual is None else x + residual
    y = rms_norm(x, x.shape[-1:], self.weight, self.eps)
    return (y, x) if prenorm else y


@pytest.fixture
def mixers_run_here(monkeypatch):
    """On a CPU, for the types that a test names to it."""

    def replace(model):
        modeling = sys.modules[type(model).__module__]
        if DEVICE == "cuda":
            return
        from fla.modules.norm.layernorm import RMSNorm
        from fla.ops.attnres import naive_attnres

        for module in (modeling, sys.modules["fla.models.modeling_utils"]):
            monkeypatch.setattr(module, "fused_attnres", naive_attnres)
        monkeypatch.setattr(RMSNorm, "forward", norm)
        monkeypatch.setattr(
            sys.modules["fla.modules.mlp"], "swiglu", lambda gate, up: silu(gate) * up
        )
        layers = next(model.children()).layers
        for mixer in {type(getattr(layer, "attn", None) or layer.mixer) for layer in layers}:
            monkeypatch.setattr(mixer, "forward", stand_in(mixer.forward))

    return replace


@pytest.fixture
def without_flash(monkeypatch):
    """Some ask for FlashAttention when they are built."""
    for name in ("attn", "mla"):
        monkeypatch.setattr(sys.modules[f"fla.layers.{name}"], "flash_attn_func", attention)


def assert_read_alike(kind, mixers_run_here, **options):
    original = other_model(kind, **options)
    mixers_run_here(original)
    weights = original.state_dict()
    model = read(original)
    assert type(model).__name__ == f"Headwater{type(original).__name__}"
    body = next(name for name, _ in original.named_children())
    back = to_release(model.state_dict(), FLA, f"{body}.")
    assert back.keys() == weights.keys()
    first = f"{body}.layers.0.attn_res_"  # the pair on which nothing depends
    others = [name for name in weights if not name.startswith(first)]
    assert all(torch.equal(back[name], weights[name]) for name in others)
    expected = logits(original, IDS)
    assert expected.std() > 0.1
    excess = (logits(model, IDS) - expected).abs() - 1e-4 * expected.abs()
    limit = torch.clamp(4 * rounding_shows(original, IDS), min=1e-4)
    assert (excess <= limit).all(), excess.amax(-1)
    return model


@torch.no_grad()
def rounding_shows(model, ids):
    """The distance that a token's logits move, (B, T, 1), when all that its modules return does by its last bit, the
    most of eight draws: a norm behind a sum that nearly vanishes makes much of that, whoever computes it."""

    def jog(_, __, output):
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            return output * (1 + 2**-23 * torch.randn_like(output).sign())
        return None

    expected, moved = model(ids).logits, []
    hooks = [module.register_forward_hook(jog) for module in model.modules()]
    for _ in range(8):
        moved.append((model(ids).logits - expected).abs().amax(-1, keepdim=True))
    for hook in hooks:
        hook.remove()
    return torch.stack(moved).amax(0)


@pytest.mark.usefixtures("without_flash")
@pytest.mark.skipif(
    DEVICE == "cuda", reason="stand-ins run on a CPU; the mixers themselves in the test after this"
)
@pytest.mark.parametrize("kind", OTHERS)
def test_its_other_models_and_ours_agree_on_a_cpu(kind, mixers_run_here):
    model = assert_read_alike(kind, mixers_run_here)
    assert conversion_of(model)[0].report.difference < 1e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="its mixers are kernels for a GPU; they go with a GPU")
@pytest.mark.parametrize("kind", ["gla", "kda", "gated_deltanet", "hgrn", "mom", "linear_attn"])
def test_its_other_models_and_ours_agree_on_a_gpu(kind, mixers_run_here):
    """At 24 tokens a mixer is a recurrence in fp32: nothing is rounded to tf32."""
    model = assert_read_alike(kind, mixers_run_here, hidden_size=128)
    assert conversion_of(model)[0].depth.norms.keys() == set(range(7)), "norms folded into reads"


@pytest.mark.parametrize("kind", ["transformer", "gla"])
def test_the_command_line_reads_its_folder(kind, mixers_run_here, tmp_path, command):
    if kind == "gla":
        original = other_model("gla", tie_word_embeddings=True)
    else:
        original = fla_model(attnres_block_size=2)
    folder, out = tmp_path / "fla", tmp_path / "model"
    original.save_pretrained(folder)
    if kind == "gla":
        mixers_run_here(original)
    words = ["convert", folder, "--out"]
    assert "residual 'attnres-block:block=2,eps=1e-06'" in command(*words, out)
    model = load(out).to(DEVICE)
    torch.testing.assert_close(logits(model, IDS), logits(original, IDS), **NEAR)
    error = command(*words, tmp_path / "other", "--residual", "mhc", code=1)
    assert "has Attention Residuals already" in error
    if kind == "gla":
        settings = json.loads((out / "config.json").read_text())
        assert settings["model_type"] == "headwater-gla"
        # As in a process that knows no fla
        assert type(stub("gla").from_dict(settings)).__mro__[1] is type(original.config)
        assert "runs on a GPU alone" in command("verify", out, out, "--device", "cpu", code=1)


def test_its_plain_models_are_converted_and_reverted(mixers_run_here, tmp_path):
    model = other_model("gla", attnres_block_size=None)
    mixers_run_here(model)
    expected = logits(model, IDS)
    report = convert(model, "attnres-full")
    # There its kernels may refuse padding beside a cache.
    assert DEVICE == "cuda" or report.difference < 1e-5
    torch.testing.assert_close(logits(model, IDS), expected, **NEAR)
    cache = model(IDS, use_cache=True).past_key_values
    assert type(cache).__module__.startswith("fla.")
    with pytest.raises(UserError, match=r"this is a GLAForCausalLM of fla\."):
        write_remote_code(model, tmp_path)
    revert(model)
    assert torch.equal(logits(model, IDS), expected)
    with pytest.raises(UserError, match="attn_res_norm, attn_res_proj"):
        convert(other_model("gla"))


def test_its_norms_are_folded_though_no_cpu_runs_them(monkeypatch):
    from fla.modules import RMSNorm

    monkeypatch.delattr(RMSNorm, "forward")  # tests have Triton's interpreter; users have none
    folded = foldable(RMSNorm(8, eps=1e-3), 2.0)
    assert folded is not None
    assert folded.eps == 1e-3 / 4


@pytest.mark.parametrize("kind", ["bitnet", "yoco"])
def test_what_of_fla_cannot_be_read_is_named(kind):
    """A type that transformers has too; layers that share keys and values."""
    with pytest.raises(UserError, match=f"got '{kind}'"):
        read_fla({}, {"model_type": kind, "attnres_block_size": 2})
