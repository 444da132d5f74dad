"""Reasons why architectures are not in the table, where the reason is known. Data only, no torch."""

import difflib
from collections.abc import Collection

from headwater.errors import UserError

from .layouts import LAYOUTS, Layout

PAGE = "docs/reference/architectures.md"
NO_DECODER = "it is not a decoder: its language model is an encoder, or no language model at all"
CROSS = "it is the decoder of a pair: its layers attend to an encoder too, which a residual here would leave out"
NORM_ON_STREAM = (
    "its norms stand on the stream itself (post-norm), so there is no plain residual to replace"
)
OWN_RESIDUAL = "its residual is not the plain one already"
OPENED = f"{OWN_RESIDUAL}, and no other starts as what it has learned: headwater.hf.open_residual opens it"
REASONS: tuple[tuple[str, str], ...] = (
    (
        NO_DECODER,
        "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta xlnet xlm xmod",
    ),
    (
        NO_DECODER,
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl bert-generation",
    ),
    (
        CROSS,
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    ),
    (CROSS, "musicgen musicgen_melody mllama blt"),
    (NORM_ON_STREAM, "minimax openai-gpt git"),
    (OPENED, "deepseek_v4 glm5_next glm5_next_text hy_v4 inkling2 inkling2_text"),
    (OPENED, "qwen4_exp qwen4_exp_text"),
    (f"{OWN_RESIDUAL}: it mixes several streams", "muse_spark gemma3n gemma3n_text"),
    (f"{OWN_RESIDUAL}: it is scaled by learned weights", "zaya doge"),
    (
        "each layer adds a per-layer embedding as a third branch",
        "gemma4 gemma4_text gemma4_assistant",
    ),
    (
        "image features are added to its stream between layers",
        "qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text",
    ),
    ("it reads the keys and values of another model", "gemma4_unified_assistant"),
    ("its blocks run several times, each time from a new sum", "hrm_text"),
    ("its experts read in one sublayer and write in a later one", "longcat_flash"),
    (
        "one attention block serves many layers and reads the embedding beside the stream",
        "zamba zamba2",
    ),
    (
        "attention and a state-space layer run side by side with multipliers of their own",
        "falcon_h1",
    ),
    ("its layers hand a bias on beside the output of attention", "gpt_neox_japanese"),
    ("its attention takes query, key and value inputs as three arguments", "ctrl cpmant"),
    (
        "its layers hand on a recurrent state of their own, or chunk the sequence",
        "rwkv xlstm reformer",
    ),
    ("its layers are not described yet", "dots3_note dots3_note_text"),
)
REFUSED: dict[str, str] = {}
for _reason, _names in REASONS:
    REFUSED |= dict.fromkeys(_names.split(), _reason)


def layout_of(model_type: str, decoders: Collection[str] = ()) -> Layout:
    """Look an architecture up in the table. `decoders` are the types that have a causal language model.

    Raises: UserError with the reason, or with the nearest architecture of the table.
    """
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    reason = REFUSED.get(model_type)
    if reason is None and decoders and model_type not in decoders:
        reason = NO_DECODER
    if reason is not None:
        raise UserError(f"'{model_type}' cannot be converted: {reason}. See {PAGE}")
    close = difflib.get_close_matches(model_type, LAYOUTS, n=1, cutoff=0.5)
    nearest = f"; the nearest that is known is '{close[0]}'" if close else ""
    raise UserError(
        f"no layout is known for the architecture '{model_type}'{nearest}. If its decoder layers fit, pass "
        f"layout=headwater.hf.Layout(...) to convert: see {PAGE}"
    )
