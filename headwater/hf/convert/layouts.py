"""Tables of where a decoder layer keeps its parts: one row per layout, one line per architecture. Data only, no torch.

To add an architecture, find the layout its decoder layer's `forward` has, or describe a new one, and put the
`model_type` of its config in the table; `tests/hf/test_hf_architectures.py` then holds it to the plain residual.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headwater.errors import UserError

EXAMPLE = '\'{"mlp_norm": "pre_feedforward_layernorm"}\''


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Attribute names of a decoder layer, or paths with dots. A sublayer is: read, norm (if any), body, each of `out`
    in turn, plus what runs beside it, each of `output` in turn, times the multiplier, write. In `out` and `output`, the
    name of a number is a dropout of that probability."""

    layers: str = "layers"  # of the model that owns the loop over layers
    final_norm: str = "norm"
    attention: tuple[str, ...] = ("self_attn",)  # the first of these that a layer has
    attention_norm: str | None = (
        "input_layernorm"  # None: attention sees the read as it is (post-norm models)
    )
    attention_out: tuple[str, ...] = ()  # norms and dropouts between a body and the residual
    mlp: tuple[str, ...] = ("mlp",)  # (): a layer is one sublayer
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out: tuple[str, ...] = ()
    # Those of these that a layer has get what the MLP gets, and are added to it
    mlp_beside: tuple[str, ...] = ()
    output: tuple[str, ...] = ()  # of every sublayer, after the sum of its bodies
    multiplier: str | None = None  # attribute of the layer: a number on every sublayer's output
    parallel: bool | str = (
        False  # attention and MLP read the same; or the attribute of the layer that says so
    )
    parallel_norm: str | None = (
        None  # the MLP's norm in a parallel layer; None: the attention's, computed once
    )
    # Of attention, for residuals that route them apart
    inputs: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    # Beside the hidden state the layer returns these of attention's results, by their number; None is None.
    returns: tuple[int | None, ...] = ()
    fp32: str | None = None  # attribute of the layer: whether the stream is kept in fp32
    shrinking: bool = False  # the stream is divided by the root of the number of its sources
    kind: str = "attention"  # of a layer's first sublayer, where it has two
    # Of an attention with inputs of its own for query, key and value: their norms, and its arguments
    separate: tuple[tuple[str, str], ...] = ()
    # A module that some layers have: it is given all streams of the residual, and added to them
    before: str | None = None
    # Of a module: its name of an argument, and the layer's where that is another
    renames: tuple[tuple[str, str, str], ...] = ()
    # Attributes of a layer by which the model's loop changes what layers hand on
    switched_off: tuple[str, ...] = ()
    otherwise: "Layout | None" = None  # for layers of the same model that this one does not fit

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not the default, for a config."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values[field.name] = value.to_dict() if isinstance(value, Layout) else value
        return values

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Layout":
        values: dict[str, Any] = {}
        for name, value in saved.items():
            if isinstance(value, Mapping):
                value = cls.from_dict(value)
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    @classmethod
    def from_text(cls, text: str) -> "Layout":
        """Read a layout from JSON, or from a file of it."""
        try:
            if not text.lstrip().startswith("{"):
                text = Path(text).read_text(encoding="utf-8")
            return cls.from_dict(json.loads(text))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"a layout is JSON or a file of it, such as {EXAMPLE}: {error}"
            ) from None

    def scale(self, read: int) -> float:
        """The plain model's stream at a read, over the sum of its sources."""
        return (read + 1) ** -0.5 if self.shrinking else 1.0


PRE_NORM = Layout()
POST_NORM = Layout(
    attention_norm=None,
    attention_out=("post_attention_layernorm",),
    mlp_norm=None,
    mlp_out=("post_feedforward_layernorm",),
)
SANDWICH = Layout(
    attention_out=("post_attention_layernorm",),
    mlp_norm="pre_feedforward_layernorm",
    mlp_out=("post_feedforward_layernorm",),
)
AFMOE = replace(SANDWICH, mlp_norm="pre_mlp_layernorm", mlp_out=("post_mlp_layernorm",))
GLM4 = Layout(attention_out=("post_self_attn_layernorm",), mlp_out=("post_mlp_layernorm",))
GRANITE = Layout(multiplier="residual_multiplier")
GRANITE_MOE = replace(GRANITE, mlp=("block_sparse_moe",))
PARALLEL = Layout(parallel=True, mlp_norm=None)
PHI = replace(
    PARALLEL,
    final_norm="final_layernorm",
    attention_out=("resid_dropout",),
    mlp_out=("resid_dropout",),
)
PHI3 = replace(PRE_NORM, attention_out=("resid_attn_dropout",), mlp_out=("resid_mlp_dropout",))
STABLELM = Layout(mlp_out=("dropout",), parallel="use_parallel_residual")
PERSIMMON = Layout(final_norm="final_layernorm", mlp_out=("dropout",))
APERTUS = Layout(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
GPT2 = Layout(
    layers="h", final_norm="ln_f", attention=("attn",), attention_norm="ln_1", mlp_norm="ln_2"
)
GPT_NEOX = Layout(
    final_norm="final_layer_norm",
    attention=("attention",),
    attention_out=("post_attention_dropout",),
    mlp_out=("post_mlp_dropout",),
    parallel="use_parallel_residual",
    parallel_norm="post_attention_layernorm",
)
LFM2 = Layout(
    final_norm="embedding_norm",
    attention=("self_attn", "conv"),
    attention_norm="operator_norm",
    mlp=("feed_forward",),
    mlp_norm="ffn_norm",
)
LFM3 = replace(LFM2, attention_out=("post_operator_norm",), mlp_out=("post_ffn_norm",))

LINEAR = Layout(attention=("self_attn", "linear_attn"))
MAMBA_HYBRID = Layout(
    attention=("self_attn", "mamba"), mlp=("feed_forward",), mlp_norm="pre_ff_layernorm"
)
JAMBA = replace(MAMBA_HYBRID, final_norm="final_layernorm")
BAMBA = replace(JAMBA, returns=(1,))
GRANITE_SHARED = replace(GRANITE_MOE, mlp_beside=("shared_mlp",))
GRANITE_HYBRID = replace(
    GRANITE_SHARED,
    attention=("self_attn", "mamba"),
    mlp=("block_sparse_moe", "shared_mlp"),
    mlp_beside=("shared_mlp",),
)
MINICPM = Layout(multiplier="residual_scale")
HYPERCLOVA = replace(GRANITE, attention_out=("post_norm1",), mlp_out=("post_norm2",))
LLAMA4 = Layout(mlp=("feed_forward",))
VAULTGEMMA = Layout(mlp_norm="pre_feedforward_layernorm")
BEAM = replace(SANDWICH, shrinking=True)
EMU3 = Layout(attention_out=("dropout",), mlp_out=("dropout",))
MODERNBERT = Layout(
    final_norm="final_norm", attention=("attn",), attention_norm="attn_norm", mlp_norm="mlp_norm"
)
INKLING = Layout(attention_out=("attn_sconv",), mlp_out=("mlp_sconv",))
JETMOE = Layout(attention=("self_attention",))
RECURRENT_GEMMA = Layout(
    final_norm="final_norm",
    attention=("temporal_block",),
    attention_norm="temporal_pre_norm",
    mlp=("mlp_block",),
    mlp_norm="channel_pre_norm",
)
OLMO_HYBRID = replace(POST_NORM, otherwise=Layout(attention=("linear_attn",)))
GLM_DSA = Layout(returns=(2,))
# From here on layers return their attention weights beside the hidden state.
GPT_NEO = replace(GPT2, returns=(1,))
GPTJ = replace(GPT_NEO, mlp_norm=None, parallel=True)
BLOOM = Layout(layers="h", final_norm="ln_f", attention=("self_attention",), returns=(1,))
FALCON_SEQUENTIAL = replace(
    BLOOM, attention_out=("config.attention_dropout",), mlp_out=("hidden_dropout",)
)
FALCON_TWO_NORMS = replace(
    BLOOM,
    parallel=True,
    attention_norm="ln_attn",
    mlp_norm=None,
    parallel_norm="ln_mlp",
    output=("hidden_dropout",),
    otherwise=FALCON_SEQUENTIAL,
)
FALCON = replace(
    BLOOM, parallel=True, mlp_norm=None, output=("hidden_dropout",), otherwise=FALCON_TWO_NORMS
)
MPT = Layout(
    layers="blocks",
    final_norm="norm_f",
    attention=("attn",),
    attention_norm="norm_1",
    attention_out=("resid_attn_dropout",),
    mlp=("ffn",),
    mlp_norm="norm_2",
    returns=(1,),
)
DBRX = Layout(
    layers="blocks",
    final_norm="norm_f",
    attention=("norm_attn_norm.attn",),
    attention_norm="norm_attn_norm.norm_1",
    mlp=("ffn",),
    mlp_norm="norm_attn_norm.norm_2",
    output=("resid_pdrop",),
)
FAIRSEQ = Layout(
    final_norm="layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp=("fc1",),
    mlp_norm="final_layer_norm",
    mlp_out=("activation_fn", "activation_dropout", "fc2"),
    output=("dropout",),
)
OPT = replace(FAIRSEQ, final_norm="final_layer_norm", mlp_out=("activation_fn", "fc2"))
MIXERS = Layout(final_norm="norm_f", attention=("mixer",), attention_norm="norm", mlp=())
MAMBA = replace(MIXERS, fp32="residual_in_fp32")
# Of flash-linear-attention: attention weights, the cache, and the bank of Attention Residuals, which is not there.
FLA = Layout(
    attention=("attn",), attention_norm="attn_norm", mlp_norm="mlp_norm", returns=(1, 2, None)
)
FLA_MOM = replace(FLA, returns=(1, 2, 3, None))
FLA_MIXER = replace(FLA, final_norm="norm_f", attention=("mixer",), attention_norm="mixer_norm")

# Layout, then every `model_type` whose decoder layer has it. `python -m benchmarks.architectures` tries each.
ROWS: tuple[tuple[Layout, str], ...] = (
    (
        PRE_NORM,
        "llama mistral ministral ministral3 qwen2 qwen3 gemma glm smollm3 starcoder2 seed_oss helium nemotron",
    ),
    (PRE_NORM, "arcee bitnet cwm diffllama ernie4_5 hunyuan_v1_dense jais2 nanochat olmo youtu"),
    (
        PRE_NORM,
        "mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss glm4_moe ernie4_5_moe deepseek_v2 deepseek_v3 dots1",
    ),
    (
        PRE_NORM,
        "hunyuan_v1_moe minimax_m2 mimo_v2_flash aria_text exaone_moe solar_open axk1 axk2 flint hy_v3 laguna",
    ),
    (
        PRE_NORM,
        "mellum minimax_m3_vl_text glm4_moe_lite deepseek_v32 kimi_linear bailing_hybrid moshi",
    ),
    (PRE_NORM, "iquestcoder internlm3"),
    (LINEAR, "qwen3_next qwen3_5_text qwen3_5_moe_text"),
    (POST_NORM, "olmo2 olmo3 flex_olmo exaone4"),
    (OLMO_HYBRID, "olmo_hybrid"),
    (SANDWICH, "gemma2 gemma3_text gemma4_unified_text"),
    (BEAM, "beam"),
    (AFMOE, "afmoe"),
    (GLM4, "glm4 kolibri1"),
    (GLM_DSA, "glm_moe_dsa"),
    (VAULTGEMMA, "vaultgemma"),
    (GRANITE, "granite granite_swa"),
    (GRANITE_MOE, "granitemoe"),
    (GRANITE_SHARED, "granitemoeshared granitemoe_swa"),
    (GRANITE_HYBRID, "granitemoehybrid"),
    (HYPERCLOVA, "hyperclovax"),
    (MINICPM, "minicpm3"),
    (LLAMA4, "llama4_text"),
    (PARALLEL, "cohere cohere2 cohere2_moe cohere_compass_text"),
    (PHI, "phi"),
    (PHI3, "phi3 phi4_multimodal"),
    (STABLELM, "stablelm"),
    (PERSIMMON, "persimmon"),
    (APERTUS, "apertus"),
    (MODERNBERT, "modernbert-decoder"),
    (INKLING, "inkling_text"),
    (JETMOE, "jetmoe"),
    (RECURRENT_GEMMA, "recurrent_gemma"),
    (GPT2, "gpt2 gpt-sw3 gpt_bigcode"),
    (GPT_NEO, "gpt_neo"),
    (GPTJ, "gptj codegen"),
    (BLOOM, "bloom"),
    (FALCON, "falcon"),
    (MPT, "mpt"),
    (DBRX, "dbrx"),
    (FAIRSEQ, "biogpt xglm"),
    (OPT, "opt"),
    (GPT_NEOX, "gpt_neox"),
    (LFM2, "lfm2 lfm2_moe"),
    (LFM3, "lfm3"),
    (JAMBA, "jamba"),
    (BAMBA, "bamba"),
    (MAMBA, "mamba mamba2 falcon_mamba"),
    (MIXERS, "nemotron_h"),
)
# Text parts of vision-language models that are no causal language model of their own.
TEXT_PARTS: tuple[tuple[Layout, str], ...] = (
    (PRE_NORM, "qwen2_vl_text qwen2_5_vl_text"),
    (EMU3, "emu3_text_model"),
)
# Types that flash-linear-attention adds to transformers when it is imported, its models with Attention Residuals.
FLA_ROWS: tuple[tuple[Layout, str], ...] = (
    (
        FLA,
        "abc comba delta_net deltaformer forgetting_transformer gated_deltanet gated_deltaproduct gla gsa hgrn",
    ),
    (
        FLA,
        "hgrn2 kda lightnet linear_attn mesa_net mla moba nsa parallax path_attn raven retnet transformer",
    ),
    (FLA, "wall_transformer"),
    (FLA_MOM, "mom"),
    (FLA_MIXER, "log_linear_mamba2 samba"),
)
FLA_TYPES = tuple(name for _, names in FLA_ROWS for name in names.split())
PREFIX = "headwater-"  # of the model type of a converted model
LAYOUTS: Mapping[str, Layout] = {
    name: layout for layout, names in (*ROWS, *TEXT_PARTS, *FLA_ROWS) for name in names.split()
}
