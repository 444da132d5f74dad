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
from tinyhf import VOCAB, tiny_model, tokens
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headwater.cli import main
from headwater.errors import UserError
from headwater.hf import FLA, convert, revert, to_release, verify
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
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 4, "num_kv_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "use_cache": False, "initializer_range": 0.2,
}  # fmt: skip


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
        monkeypatch.setattr(
            Autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0]
        )  # the interpreter has no clock


def fla_model(**options):
    """Random, with queries, key weights and norms away from their start; its kernels fuse norms only on a GPU."""
    torch.manual_seed(0)
    fused = {"fuse_norm": DEVICE == "cuda", "fuse_swiglu": DEVICE == "cuda"}
    model = transformer.TransformerForCausalLM(
        transformer.TransformerConfig(**{**SHAPE, **fused, **options})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval().to(DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {"attnres_block_size": 2, "norm_eps": 1e-3},  # an eps so large that one out of place shows
        {"attnres_block_size": 4, "qkv_bias": True},
        {"attnres_block_size": 1, "qk_norm": True, "norm_eps": 1e-5},
        {
            "attnres_block_size": 6,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
        },  # the last block is partial
        {"attnres_block_size": 16, "num_kv_heads": None},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_its_model_and_ours_agree(options):
    theirs = fla_model(**options)
    ours = read_fla(theirs.state_dict(), theirs.config.to_dict()).to(DEVICE)
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_config_may_leave_out_its_defaults():
    theirs = fla_model(attnres_block_size=2)
    whole = theirs.config.to_dict()
    own = transformer.TransformerConfig().to_dict()
    assert {name: own[name] for name in DEFAULTS} == DEFAULTS
    short = {name: value for name, value in whole.items() if value != own.get(name)}
    assert not {"pad_token_id", "qk_norm", "qkv_bias", "window_size", "norm_eps"} & short.keys()
    models = [read_fla(theirs.state_dict(), config) for config in (whole, short)]
    assert models[0].config.to_dict() == models[1].config.to_dict()
    with torch.no_grad():
        assert torch.equal(models[0](tokens()).logits, models[1](tokens()).logits)


def test_the_command_line_reads_its_folder(tmp_path, capsys):
    theirs = fla_model(attnres_block_size=2)
    theirs.save_pretrained(tmp_path / "fla")
    assert main(["convert", str(tmp_path / "fla"), "--out", str(tmp_path / "ours")]) == 0
    assert "residual 'attnres-block:block=2,eps=1e-06'" in capsys.readouterr().out
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(DEVICE)
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    again = [
        "convert",
        str(tmp_path / "fla"),
        "--out",
        str(tmp_path / "other"),
        "--residual",
        "mhc",
    ]
    assert main(again) == 1
    assert "has Attention Residuals already" in capsys.readouterr().err


def test_our_weights_go_back_into_its_model():
    theirs = fla_model(attnres_block_size=2)
    ours = read_fla(theirs.state_dict(), theirs.config.to_dict())
    blank = transformer.TransformerForCausalLM(theirs.config).eval()
    blank.load_state_dict(to_release(ours.state_dict(), FLA))
    blank.to(DEVICE)
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(blank(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window_size": 8}, "window_size=8"),
        ({"hidden_act": "powlu"}, "hidden_act=powlu"),
        ({"qk_norm": True}, "qk_norm=True .* unless norm_eps is 1e-05"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(options, named):
    config = transformer.TransformerConfig(**SHAPE, attnres_block_size=2, **options).to_dict()
    with pytest.raises(UserError, match=named):
        read_fla({}, config)


def test_types_that_it_registers_over_transformers_do_not_disturb_ours(tmp_path):
    """Importing fla gives the type `bitnet` to a config of its own."""
    model, plain = tiny_model("bitnet"), tiny_model("bitnet")
    assert type(model.config) is not CONFIG_MAPPING["bitnet"]
    convert(model)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert type(stub("bitnet").from_dict(settings)) is type(model.config)
    assert verify(AutoModelForCausalLM.from_pretrained(tmp_path), plain, tokens()).equal


OTHERS = [name for name in FLA_TYPES if name != "transformer"]
WIDE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "use_cache": False,
    "initializer_range": 0.2,
}
SIZES = {  # where heads of the default width, or of none, do not fit
    "hgrn": {"intermediate_size": 48},
    "hgrn2": {"num_heads": 2, "expand_ratio": 32, "intermediate_size": 48},
    "nsa": {"num_heads": 16, "num_kv_heads": 1, "intermediate_size": 48},
    "log_linear_mamba2": {"num_heads": 2, "head_dim": 64, "state_size": 16},
    "samba": {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 4}},
}


def other_model(model_type, **options):
    """One of fla's models that is no Llama, as `fla_model`, every parameter of one axis off its start."""
    torch.manual_seed(0)
    fused = {"fuse_norm": DEVICE == "cuda", "fuse_swiglu": DEVICE == "cuda"}
    sizes = SIZES.get(model_type, {"num_heads": 2, "intermediate_size": 48})
    config = CONFIG_MAPPING[model_type](
        **{**WIDE, **sizes, **fused, "attnres_block_size": 2, **options}
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval().to(DEVICE)


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


def assert_read_alike(model_type, mixers_run_here, **options):
    theirs = other_model(model_type, **options)
    mixers_run_here(theirs)
    weights = theirs.state_dict()
    ours = read_fla(weights, theirs.config.to_dict()).to(DEVICE)
    assert type(ours).__name__ == f"Headwater{type(theirs).__name__}"
    body = next(name for name, _ in theirs.named_children())
    back = to_release(ours.state_dict(), FLA, f"{body}.")
    first = f"{body}.layers.0.attn_res_"  # the pair on which nothing depends
    assert back.keys() == weights.keys()
    assert all(
        torch.equal(back[name], weights[name]) for name in weights if not name.startswith(first)
    )
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.std() > 0.1
        apart = (ours(ids).logits - expected).abs() - 1e-4 * expected.abs()
        assert (apart <= torch.clamp(4 * rounding_matters(theirs, ids), min=1e-4)).all(), (
            apart.amax(-1)
        )
    return theirs, ours


def rounding_matters(model, ids):
    """How far a token's logits move, (B, T, 1), when all that its modules return does by its last bit, the most of
    eight draws: a norm behind a sum that nearly vanishes makes much of that, whoever computes it."""

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
@pytest.mark.parametrize("model_type", OTHERS)
def test_its_other_models_and_ours_agree_on_a_cpu(model_type, mixers_run_here):
    _, ours = assert_read_alike(model_type, mixers_run_here)
    assert conversion_of(ours)[0].report.difference < 1e-5


@pytest.mark.usefixtures("untuned_fla")
@pytest.mark.skipif(DEVICE == "cpu", reason="its mixers are kernels for a GPU; they go with a GPU")
@pytest.mark.parametrize(
    "model_type", ["gla", "kda", "gated_deltanet", "hgrn", "mom", "linear_attn"]
)
def test_its_other_models_and_ours_agree_on_a_gpu(model_type, mixers_run_here):
    """At 24 tokens a mixer is a recurrence in fp32: nothing is rounded to tf32."""
    _, ours = assert_read_alike(model_type, mixers_run_here, hidden_size=128)
    assert conversion_of(ours)[0].depth.norms.keys() == set(range(7)), (
        "its norms are folded into reads"
    )


def test_its_other_models_are_saved_and_loaded(mixers_run_here, tmp_path, capsys):
    theirs = other_model("gla", tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "fla")
    mixers_run_here(theirs)
    assert main(["convert", str(tmp_path / "fla"), "--out", str(tmp_path / "ours")]) == 0
    assert "residual 'attnres-block:block=2,eps=1e-06'" in capsys.readouterr().out
    settings = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert settings["model_type"] == "headwater-gla"
    assert type(stub("gla").from_dict(settings)).__mro__[1] is type(
        theirs.config
    )  # as in a process that knows no fla
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(DEVICE)
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert main(["verify", str(tmp_path / "ours"), str(tmp_path / "ours"), "--device", "cpu"]) == 1
    assert "runs on a GPU alone" in capsys.readouterr().err


def test_its_plain_models_are_converted_and_reverted(mixers_run_here, tmp_path):
    model = other_model("gla", attnres_block_size=None)
    mixers_run_here(model)
    ids = tokens().to(DEVICE)
    with torch.no_grad():
        expected = model(ids).logits
        report = convert(model, "attnres-full")
        assert (
            DEVICE == "cuda" or report.difference < 1e-5
        )  # there its kernels may refuse padding beside a cache
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match="its modeling file is fla's, not transformers'"):
            write_remote_code(model, tmp_path)
        revert(model)
        assert torch.equal(model(ids).logits, expected)
    with pytest.raises(UserError, match="attn_res_norm, attn_res_proj"):
        convert(other_model("gla"))


def test_its_norms_are_folded_though_no_cpu_runs_them(monkeypatch):
    from fla.modules import RMSNorm

    monkeypatch.delattr(RMSNorm, "forward")  # tests have Triton's interpreter; users have none
    found = foldable(RMSNorm(8, eps=1e-3), 2.0)
    assert found is not None
    assert found.eps == 1e-3 / 4


def test_its_cache_comes_back_from_a_converted_model(mixers_run_here):
    model = other_model("gla", attnres_block_size=None)
    mixers_run_here(model)
    convert(model)
    assert type(model(tokens().to(DEVICE), use_cache=True).past_key_values).__module__.startswith(
        "fla."
    )


def test_what_of_fla_cannot_be_read_is_named(monkeypatch):
    for wrong in (
        "bitnet",
        "yoco",
    ):  # a type that transformers has too; layers that share keys and values
        with pytest.raises(UserError, match=f"got '{wrong}'"):
            read_fla({}, {"model_type": wrong, "attnres_block_size": 2})
    with pytest.raises(UserError, match=r"they have no '\*\.embeddings\.weight'"):
        read_fla({}, {"model_type": "gla", **WIDE, "attnres_block_size": 2})
    monkeypatch.setitem(sys.modules, "fla.models", None)
    with pytest.raises(UserError, match="pip install flash-linear-attention"):
        read_fla({}, {"model_type": "gla", "attnres_block_size": 2})
