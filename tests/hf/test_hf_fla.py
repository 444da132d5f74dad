"""Attention Residuals in flash-linear-attention's own model, beside ours reading its checkpoint: equal logits.

On a GPU its fused operators run. On a CPU its rotary and SwiGLU kernels run under Triton's interpreter and the one that
asks for CUDA, the depth read, is its own reference. FlashAttention, which it imports, is PyTorch's attention in both.
"""

import json

import pytest
import torch
from tinyhf import VOCAB, tiny_model, tokens
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headwater.cli import main
from headwater.errors import UserError
from headwater.hf import FLA, convert, to_release, verify
from headwater.hf.convert.registration import stub
from headwater.hf.formats.fla import DEFAULTS, read_fla

transformer = pytest.importorskip("fla.models.transformer", reason="needs flash-linear-attention, an extra of `dev`")
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
        monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0])  # the interpreter has no clock


def fla_model(**options):
    """Random, with queries, key weights and norms away from their start; its kernels fuse norms only on a GPU."""
    torch.manual_seed(0)
    fused = {"fuse_norm": DEVICE == "cuda", "fuse_swiglu": DEVICE == "cuda"}
    model = transformer.TransformerForCausalLM(transformer.TransformerConfig(**{**SHAPE, **fused, **options}))
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
        {"attnres_block_size": 6, "tie_word_embeddings": True, "rope_theta": 500.0},  # the last block is partial
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
    again = ["convert", str(tmp_path / "fla"), "--out", str(tmp_path / "other"), "--residual", "mhc"]
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
