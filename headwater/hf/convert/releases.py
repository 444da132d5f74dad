"""Tables of the models of transformers that were released with a learned residual: where its weights lie, and which of
our residuals it is. Data only, no torch.

`opening.py` moves the weights by these tables; `tests/hf/test_hf_opened.py` holds each row to the model it describes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .layouts import GLM_DSA, Layout


@dataclass(frozen=True, kw_only=True)
class Release:
    """A released residual, as ours."""

    layout: Layout  # of the body
    residual: str
    # Options of the residual, with the fields of the config that say them
    options: Mapping[str, str]
    # The modules that hold the weights of a layer's reads, in their order, and of the final read
    reads: tuple[str, str]
    final: str
    table: str  # of our residual: the dictionary of parameters by sublayer
    names: Mapping[str, str]  # of their parameters, and of ours
    transposed: bool = False  # their mixing matrix is ours, transposed


MAPPINGS = {
    "fn": "weight",
    "base": "bias",
    "scale": "scale",
    "hc_fn": "weight",
    "hc_base": "bias",
    "hc_scale": "scale",
}
CONNECTIONS = ("attn_hc", "ffn_hc")
SLIDING = Layout(
    kind="mixer",
    attention_out=("post_attention_convolution",),
    mlp_out=("post_mlp_convolution",),
    switched_off=("is_block_boundary",),
)
INKLING2 = replace(
    SLIDING,
    kind="attention",
    attention_norm=None,
    separate=(
        ("q_input_layernorm", "hidden_states"),
        ("k_input_layernorm", "key_hidden_states"),
        ("v_input_layernorm", "value_hidden_states"),
    ),
    otherwise=SLIDING,
)

RELEASES: dict[str, Release] = {
    "inkling2_text": Release(
        layout=INKLING2,
        residual="attnres-routed",
        options={"block": "n_layers_per_attn_res_block"},
        reads=("attention_input", "mlp_input"),
        final="final_input",
        table="reads",
        names={"query": "query"},
    ),
    "deepseek_v4": Release(
        layout=Layout(),
        residual="mhc:final=learned",
        options={
            "streams": "hc_mult",
            "iterations": "hc_sinkhorn_iters",
            "eps": "hc_eps",
            "norm_eps": "rms_norm_eps",
        },
        reads=CONNECTIONS,
        final="hc_head",
        table="mappings",
        names=MAPPINGS,
        transposed=True,
    ),
    "hy_v4": Release(
        layout=GLM_DSA,
        residual="identity-hc",
        options={
            "streams": "hc_mult",
            "magnitude": "hc_magnitude",
            "eps": "hc_eps",
            "norm_eps": "rms_norm_eps",
        },
        reads=CONNECTIONS,
        final="hc_head",
        table="mappings",
        names=MAPPINGS,
    ),
}
RELEASES["glm5_next_text"] = replace(
    RELEASES["deepseek_v4"], layout=GLM_DSA, residual="mhc:final=mean"
)
RELEASES["qwen4_exp_text"] = Release(
    layout=Layout(
        final_norm="hyper_connection_mixer",
        attention=("self_attn", "linear_attn"),
        attention_norm=None,
        mlp_norm=None,
        before="ple",
        renames=(
            ("ple", "input_ids", "ple_input_ids"),
            ("linear_attn", "attention_mask", "conv_mask"),
        ),
    ),
    residual="gated-hc",
    options={"streams": "hc_count", "rank": "hc_lowrank", "eps": "rms_norm_eps"},
    reads=("attn_hyper_connection", "mlp_hyper_connection"),
    final="hyper_connection_mixer",
    table="gates",
    names={
        "hc_norm.weight": "norm",
        "input_mix_weight_down.weight": "down",
        "input_mix_weight_up.weight": "up",
        "block_inject_weight.weight": "inject",
    },
)
