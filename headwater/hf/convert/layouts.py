"""Where a decoder layer keeps its parts: one row per layout, one line per architecture. Data only, no torch.

To add an architecture, find the layout its decoder layer's `forward` has, or describe a new one, and put the
`model_type` of its config in the table; `tests/hf/test_hf_architectures.py` then holds it to the plain residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headwater.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Attribute names. A sublayer is: read, norm (if any), body, each of `out` in turn, times the multiplier, write."""

    layers: str = "layers"  # of the model that owns the loop over layers
    final_norm: str = "norm"
    attention: tuple[str, ...] = ("self_attn",)  # the first of these that a layer has
    attention_norm: str | None = "input_layernorm"  # None: attention sees the read as it is (post-norm models)
    attention_out: tuple[str, ...] = ()  # norms and dropouts between a body and the residual
    mlp: tuple[str, ...] = ("mlp",)
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out: tuple[str, ...] = ()
    multiplier: str | None = None  # attribute of the layer: a number on every sublayer's output
    parallel: bool | str = False  # attention and MLP read the same; or the attribute of the layer that says so
    parallel_norm: str | None = None  # the MLP's norm in a parallel layer; None: the attention's, computed once
    inputs: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")  # of attention, for residuals that route them apart

    def parts(self) -> set[str]:
        """Every module of a layer that this layout uses."""
        single = (self.attention_norm, self.mlp_norm, self.parallel_norm)
        several = (*self.attention, *self.attention_out, *self.mlp, *self.mlp_out)
        return {name for name in (*single, *several) if name is not None}


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
PHI = replace(PARALLEL, final_norm="final_layernorm", attention_out=("resid_dropout",), mlp_out=("resid_dropout",))
PHI3 = replace(PRE_NORM, attention_out=("resid_attn_dropout",), mlp_out=("resid_mlp_dropout",))
STABLELM = Layout(mlp_out=("dropout",), parallel="use_parallel_residual")
PERSIMMON = Layout(final_norm="final_layernorm", mlp_out=("dropout",))
APERTUS = Layout(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
GPT2 = Layout(layers="h", final_norm="ln_f", attention=("attn",), attention_norm="ln_1", mlp_norm="ln_2")
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

# Layout, then every `model_type` whose decoder layer has it. A test converts a small random model of each.
ROWS: tuple[tuple[Layout, str], ...] = (
    (PRE_NORM, "llama mistral ministral ministral3 qwen2 qwen3 gemma glm smollm3 starcoder2 seed_oss helium nemotron"),
    (PRE_NORM, "arcee bitnet cwm diffllama ernie4_5 hunyuan_v1_dense jais2 nanochat olmo"),
    (PRE_NORM, "mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss glm4_moe ernie4_5_moe deepseek_v2 deepseek_v3 dots1"),
    (PRE_NORM, "hunyuan_v1_moe minimax_m2 mimo_v2_flash aria_text exaone_moe solar_open"),
    (POST_NORM, "olmo2 olmo3 flex_olmo exaone4"),
    (SANDWICH, "gemma2 gemma3_text"),
    (AFMOE, "afmoe"),
    (GLM4, "glm4"),
    (GRANITE, "granite granite_swa"),
    (GRANITE_MOE, "granitemoe"),
    (PARALLEL, "cohere cohere2"),
    (PHI, "phi"),
    (PHI3, "phi3"),
    (STABLELM, "stablelm"),
    (PERSIMMON, "persimmon"),
    (APERTUS, "apertus"),
    (GPT2, "gpt2 gpt_bigcode"),
    (GPT_NEOX, "gpt_neox"),
    (LFM2, "lfm2"),
)
PREFIX = "headwater-"  # of the model type of a converted model
LAYOUTS: Mapping[str, Layout] = {name: layout for layout, names in ROWS for name in names.split()}


def layout_of(model_type: str) -> Layout:
    if model_type not in LAYOUTS:
        raise UserError(
            f"no layout is known for the architecture '{model_type}'. Known: {', '.join(sorted(LAYOUTS))}. "
            f"If its decoder layers fit, pass layout=headwater.hf.Layout(...) to convert, "
            f"or add a row '{model_type}' to headwater/hf/convert/layouts.py"
        )
    return LAYOUTS[model_type]
