"""Kimi Linear checkpoints in headwater's decoder and back: transformers' names, and those of the released files.

A checkpoint of transformers' `kimi_linear` is a decoder of `models`, with its layers as a pattern. Released files keep
the three convolutions apart and every expert by itself; transformers joins the former to one tensor and stacks the
latter, gate and up together. One table has all names, and is read in both directions.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwater.errors import UserError, check_fit
from headwater.folders import at_home, check_hashes, whole_folder
from headwater.models import Decoder, ModelConfig
from headwater.models.pattern import write_pattern
from headwater.residuals import Residual, parse
from headwater.residuals.attention import AttentionResidual

from .export import OUTER
from .released import KIMI_K3, from_release, to_release

# For each kind of body its tensors here, in transformers, and in the released files. Where two of ours have one name in
# transformers, they are joined there along an axis. A name with braces stands for one tensor an expert, which we stack.
NAMES = {
    "kda": (
        ("query.weight", "self_attn.q_proj.weight", "self_attn.q_proj.weight"),
        ("key.weight", "self_attn.k_proj.weight", "self_attn.k_proj.weight"),
        ("value.weight", "self_attn.v_proj.weight", "self_attn.v_proj.weight"),
        ("query_conv.weight", "self_attn.conv1d.weight", "self_attn.q_conv1d.weight"),
        ("key_conv.weight", "self_attn.conv1d.weight", "self_attn.k_conv1d.weight"),
        ("value_conv.weight", "self_attn.conv1d.weight", "self_attn.v_conv1d.weight"),
        ("decay_down.weight", "self_attn.forget_gate.f_a_proj.weight", "self_attn.f_a_proj.weight"),
        ("decay_up.weight", "self_attn.forget_gate.f_b_proj.weight", "self_attn.f_b_proj.weight"),
        ("decay.rate", "self_attn.forget_gate.A_log", "self_attn.A_log"),
        ("decay.bias", "self_attn.forget_gate.dt_bias", "self_attn.dt_bias"),
        ("beta.weight", "self_attn.b_proj.weight", "self_attn.b_proj.weight"),
        ("gate_down.weight", "self_attn.g_a_proj.weight", "self_attn.g_a_proj.weight"),
        ("gate_up.weight", "self_attn.g_b_proj.weight", "self_attn.g_b_proj.weight"),
        ("norm.weight", "self_attn.o_norm.weight", "self_attn.o_norm.weight"),
        ("output.weight", "self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ),
    "mla": (
        ("query.weight", "self_attn.q_proj.weight", "self_attn.q_proj.weight"),
        (
            "down.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
        ),
        ("norm.weight", "self_attn.kv_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        ("up.weight", "self_attn.kv_b_proj.weight", "self_attn.kv_b_proj.weight"),
        ("output.weight", "self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ),
    "mlp": (
        ("gate.weight", "mlp.gate_proj.weight", "mlp.gate_proj.weight"),
        ("up.weight", "mlp.up_proj.weight", "mlp.up_proj.weight"),
        ("output.weight", "mlp.down_proj.weight", "mlp.down_proj.weight"),
    ),
    "moe": (
        ("router.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight"),
        (
            "router.bias",
            "mlp.gate.e_score_correction_bias",
            "block_sparse_moe.gate.e_score_correction_bias",
        ),
        ("experts.gate", "mlp.experts.gate_up_proj", "block_sparse_moe.experts.{}.w1.weight"),
        ("experts.up", "mlp.experts.gate_up_proj", "block_sparse_moe.experts.{}.w3.weight"),
        ("experts.output", "mlp.experts.down_proj", "block_sparse_moe.experts.{}.w2.weight"),
        (
            "shared.gate.weight",
            "mlp.shared_experts.gate_proj.weight",
            "block_sparse_moe.shared_experts.gate_proj.weight",
        ),
        (
            "shared.up.weight",
            "mlp.shared_experts.up_proj.weight",
            "block_sparse_moe.shared_experts.up_proj.weight",
        ),
        (
            "shared.output.weight",
            "mlp.shared_experts.down_proj.weight",
            "block_sparse_moe.shared_experts.down_proj.weight",
        ),
    ),
}
EXPERTS, MLP = "block_sparse_moe.", "mlp."
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")  # before attention, the MLP


class Place(NamedTuple):
    """Tensors of ours and their names in a checkpoint: several are joined there, or one is apart by expert."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    axis: int = 0  # along which several of ours are joined
    stacked: bool = False  # ours has one of theirs for each expert

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors by name."""
        tensor = tensors[self.theirs[0]]
        if self.stacked:
            tensor = torch.stack([tensors[name] for name in self.theirs])
        parts = tensor.chunk(len(self.ours), self.axis)
        return {name: _shaped_here(name, part) for name, part in zip(self.ours, parts)}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors by name."""
        tensor = torch.cat([_shaped_there(name, tensors[name]) for name in self.ours], self.axis)
        return dict(zip(self.theirs, tensor.unbind() if self.stacked else [tensor]))


def _shaped_here(name: str, tensor: Tensor) -> Tensor:
    return (tensor.reshape(-1) if name.endswith("decay.rate") else tensor).contiguous()


def _shaped_there(name: str, tensor: Tensor) -> Tensor:
    return tensor.view(1, 1, -1, 1) if name.endswith("decay.rate") else tensor


def load_kimi(folder: str | Path, residual: str | None = None) -> Decoder:
    """A Kimi Linear checkpoint as a decoder, with any residual.

    Arguments:
        folder: config.json and .safetensors files, with transformers' names or the released ones.
        residual: how depth is connected, such as "attnres-block:block=6"; its own parameters begin at their start. None
            takes the checkpoint's: the plain residual, or Attention Residuals with what they have learned.

    Returns: a `Decoder` in fp32 on the CPU. All of it is held in memory.

    Raises: `headwater.errors.UserError` for a folder without these files, and for a model that the decoder does not
        compute: Kimi K3 with its gates and latent experts, a layer list that is not one, a compressed query.

        model = headwater.hf.load_kimi("Kimi-Linear", residual="attnres-block:block=6")
    """
    folder = at_home(folder)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} must hold config.json and .safetensors files of a Kimi Linear model"
        )
    check_hashes(folder)
    config = json.loads((folder / "config.json").read_text())
    settings = kimi_settings(config)
    if residual is not None:
        settings["residual"] = residual
    model = Decoder(ModelConfig.from_dict(settings))
    tensors = dict(_tensors(folder))
    learned: dict[str, Tensor] = {}
    if config.get(KIMI_K3.block_field) is not None:
        learned, tensors = _apart(from_release(tensors, KIMI_K3), "model.residual.")
    if residual is not None or not learned:
        learned, _ = _apart(model.weights(), "residual.")
    weights = read_kimi(tensors, settings)
    weights |= {name.removeprefix("model."): tensor for name, tensor in learned.items()}
    try:
        model.load_weights(weights)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    return model


def save_kimi(model: Decoder, folder: str | Path, *, released: bool = False) -> None:
    """Write a decoder as a Kimi Linear checkpoint: config.json and model.safetensors.

    Arguments:
        model: a decoder of KDA and MLA layers with the plain residual; where `released`, Block Attention Residuals
            too, if their blocks are whole layers and their eps is the model's (`attnres-block:block=4,eps=1e-5`).
        folder: where to; made if need be.
        released: with the names and the config of the released files, as vLLM reads them; else transformers' names.
            transformers loads either, but knows no Attention Residuals here.

    Raises: `headwater.errors.UserError` for a decoder that is no Kimi Linear.

        headwater.hf.save_kimi(model, "mine")
        AutoModelForCausalLM.from_pretrained("mine")
    """
    settings = model.config.to_dict()
    block = None
    if released and model.config.residual != "standard":
        block = _layers_in_a_block(model.residual, model.config)
        settings["residual"] = "standard"
    learned, plain = _apart(model.weights(), "residual.")
    config = kimi_config(settings)
    weights = write_kimi(plain, settings, released=released)
    if released:
        config |= _released_config(config, next(iter(weights.values())).dtype)
    if block is not None:
        config[KIMI_K3.block_field] = block
        learned = {f"model.{name}": tensor for name, tensor in learned.items()}
        weights = to_release(weights | learned, KIMI_K3)
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    with whole_folder(at_home(folder)) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})


def _apart(
    weights: Mapping[str, Tensor], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors whose names begin with a prefix, and the others."""
    inside = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return inside, {name: tensor for name, tensor in weights.items() if name not in inside}


def _layers_in_a_block(residual: Residual, config: ModelConfig) -> int:
    """The size of a block as the released config counts it. Raises UserError for what no such config can say."""
    options = parse(residual.spec)[1]
    usual = isinstance(residual, AttentionResidual) and residual.phased
    usual = usual and options.get("key_weight", True) and options.get("scale", "one") == "one"
    problem = None
    if not isinstance(residual, AttentionResidual) or not usual:
        problem = f"residual '{residual.spec}'"
    elif residual.block % KIMI_K3.block_unit:
        problem = f"blocks of {residual.block} sublayers, which are no whole layers,"
    elif residual.eps != config.norm_eps:
        problem = (
            f"residual eps {residual.eps} beside norm_eps {config.norm_eps}, which are one there,"
        )
    if problem is not None or not isinstance(residual, AttentionResidual):
        raise UserError(f"a decoder with {problem} cannot be saved as a released Kimi Linear")
    return residual.block // KIMI_K3.block_unit


def kimi_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's settings for a config of transformers' `kimi_linear`, or of a released checkpoint."""
    _refuse(config)
    linear, layers = config.get("linear_attn_config") or {}, config["num_hidden_layers"]
    mixers, dense = _mixers(config, linear), _dense(config, layers)
    names = [f"{mixer}+{'mlp' if flag else 'moe'}" for mixer, flag in zip(mixers, dense)]
    first = dense.index(False) if False in dense else layers
    if not any(dense[first:]):  # as `dense_layers` says it
        names = mixers
    eps = config.get("rms_norm_eps", 1e-5)
    heads = config.get("num_attention_heads", 32)
    return {
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "mlp_dim": config["intermediate_size"],
        "context": _named(config, "model_max_length", "max_position_embeddings", default=4096),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm_eps": eps,
        "pattern": write_pattern(names),
        "kda_heads": linear.get("num_heads", config.get("linear_num_heads", 32)),
        "kda_head_dim": linear.get("head_dim", config.get("linear_head_dim", 128)),
        "kda_conv": linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        "kda_norm_eps": eps,
        "mla_latent": config.get("kv_lora_rank", 512),
        "mla_head_dim": config.get("qk_nope_head_dim", 128),
        "mla_shared_dim": config.get("qk_rope_head_dim", 64),
        "mla_value_dim": config.get("v_head_dim", 128),
        "experts": _named(config, "num_experts", "num_local_experts", default=256),
        "experts_per_token": _named(
            config, "num_experts_per_token", "num_experts_per_tok", default=8
        ),
        "expert_dim": config.get("moe_intermediate_size", 1024),
        "shared_experts": _named(config, "num_shared_experts", "n_shared_experts", default=1),
        "expert_scale": config.get("routed_scaling_factor", 2.446),
        "dense_layers": first if names is mixers else 0,
        "residual": _residual_of(config),
    }


def _residual_of(config: Mapping[str, Any]) -> str:
    """The residual that a config names, by the number of layers in a block."""
    if config.get(KIMI_K3.block_field) is None:
        return "standard"
    block = min(KIMI_K3.block(config), 2 * config["num_hidden_layers"])
    return f"attnres-block:block={block},eps={KIMI_K3.eps(config)}"


def _named(config: Mapping[str, Any], *names: str, default: int) -> int:
    """A value that transformers and the released config name differently."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def _refuse(config: Mapping[str, Any]) -> None:
    """Refuse what the decoder does not compute, and what is not Kimi Linear."""
    if config.get("model_type") != "kimi_linear":
        raise UserError(f"model_type must be 'kimi_linear', got {config.get('model_type')!r}")
    linear = config.get("linear_attn_config") or {}
    if linear.get("use_full_rank_gate"):
        raise UserError(
            "linear_attn_config has use_full_rank_gate, as Kimi K3, which is not implemented"
        )
    allowed: dict[str, tuple[Any, ...]] = {
        "q_lora_rank": (None,),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "moe_router_activation_func": ("sigmoid", None),
        "moe_renormalize": (True, None),
        "norm_topk_prob": (True, None),
        "num_expert_group": (1, None),
        "n_group": (1, None),
        "num_key_value_heads": (config.get("num_attention_heads", 32), None),
        "mla_use_nope": (True, None),
        "mla_use_output_gate": (False, None),
        "routed_expert_hidden_size": (None,),
        "moe_layer_freq": (1, None),
    }
    for name, values in allowed.items():
        if config.get(name) not in values:
            raise UserError(
                f"{name} must be {values[0]} in a Kimi Linear that the decoder takes, got {config[name]}"
            )


def _mixers(config: Mapping[str, Any], linear: Mapping[str, Any]) -> list[str]:
    """kda or mla for each layer. transformers' list counts from 0; the released lists name layers from 1."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"linear_attention": "kda", "full_attention": "mla"}
        if len(kinds) != layers or any(kind not in known for kind in kinds):
            raise UserError(
                f"layer_types must name linear_attention or full_attention for each of {layers} layers, got {kinds}"
            )
        return [known[kind] for kind in kinds]
    full, delta = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is None or delta is None:
        raise UserError(
            "the config names no layers: give layer_types, or full_attn_layers and kda_layers in linear_attn_config"
        )
    if sorted([*full, *delta]) != list(range(1, layers + 1)):
        raise UserError(
            f"full_attn_layers and kda_layers must name each layer from 1 to {layers} once, got {full} and {delta}"
        )
    return ["mla" if number in full else "kda" for number in range(1, layers + 1)]


def _dense(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Flags of the layers that have an MLP in place of experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        first = config.get("first_k_dense_replace", 1)
        return [i < first for i in range(layers)]
    if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise UserError(
            f"mlp_layer_types must name dense or sparse for each of {layers} layers, got {kinds}"
        )
    return [kind == "dense" for kind in kinds]


def kimi_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' config for a decoder's settings."""
    config = ModelConfig.from_dict(settings)
    layers = config.layout
    problem = None
    if any(len(layer) != 2 or layer[0] not in ("kda", "mla") for layer in layers):
        problem = f"pattern '{config.pattern}' has layers other than kda and mla"
    elif config.residual != "standard":
        problem = f"residual '{config.residual}'"
    elif config.kda_gate != "softplus":
        problem = f"kda_gate '{config.kda_gate}'"
    elif config.kda_norm_eps != config.norm_eps:
        problem = f"kda_norm_eps {config.kda_norm_eps} beside norm_eps {config.norm_eps}, which are one there,"
    elif "moe" in config.kinds and config.shared_experts == 0:
        problem = "shared_experts 0"
    if problem is not None:
        raise UserError(
            f"a decoder with {problem} has no counterpart in Kimi Linear; it cannot be saved as one"
        )
    head = config.dim // config.heads
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "moe_intermediate_size": config.expert_width if config.experts else 1,
        "model_max_length": config.context,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "layer_types": [
            "full_attention" if layer[0] == "mla" else "linear_attention" for layer in layers
        ],
        "mlp_layer_types": ["sparse" if layer[1] == "moe" else "dense" for layer in layers],
        "linear_num_heads": config.kda_heads or config.heads,
        "linear_head_dim": config.kda_width,
        "linear_conv_kernel_dim": config.kda_conv,
        "kv_lora_rank": config.mla_latent or 4 * head,
        "qk_nope_head_dim": config.mla_head_dim or head,
        "qk_rope_head_dim": config.mla_shared_dim or head // 2,
        "v_head_dim": config.mla_value_dim or head,
        "num_experts": max(config.experts, 1),
        "num_experts_per_token": min(config.experts_per_token, max(config.experts, 1)),
        "num_shared_experts": config.shared_experts,
        "routed_scaling_factor": config.expert_scale,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _released_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The keys of the released config, which vLLM reads, for a config of transformers'."""
    mixers, mlps = config["layer_types"], config["mlp_layer_types"]
    dense = mlps.index("sparse") if "sparse" in mlps else len(mlps)
    if "dense" in mlps[dense:]:
        raise UserError("the released config names dense layers before all others alone")
    numbers: dict[str, list[int]] = {"linear_attention": [], "full_attention": []}
    for number, kind in enumerate(mixers, start=1):
        numbers[kind].append(number)
    return {
        "linear_attn_config": {
            "kda_layers": numbers["linear_attention"],
            "full_attn_layers": numbers["full_attention"],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "mla_use_nope": True,
        "q_lora_rank": None,
        "hidden_act": "silu",
        "max_position_embeddings": config["model_max_length"],
        "dtype": str(dtype).removeprefix("torch."),
    }


def read_kimi(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Their tensors, with transformers' names or the released ones, under the names of a decoder of these settings.

    Raises: UserError for a tensor that is missing or that it has no place for, as where the layer list is another's.
    """
    config = ModelConfig.from_dict(settings)
    # transformers writes dense layers under the name of experts too.
    tensors = {name.replace(EXPERTS, MLP): tensor for name, tensor in weights.items()}
    if config.tie_embeddings:
        tensors.pop(OUTER["head.weight"], None)
    released = any(".experts.0." in name or ".q_conv1d." in name for name in tensors)
    places = list(_places(config, released, experts=MLP))
    expected = [name for place in places for name in place.theirs]
    try:
        check_fit(
            dict.fromkeys(expected, ()),
            dict.fromkeys(tensors, ()),
            "the weights are not those of the layers named",
        )
    except ValueError as error:
        raise UserError(f"{error} (layers: {config.pattern})") from None
    ours: dict[str, Tensor] = {}
    for place in places:
        ours |= place.read(tensors)
    return ours


def write_kimi(
    weights: Mapping[str, Tensor], settings: Mapping[str, Any], *, released: bool = False
) -> dict[str, Tensor]:
    """The other way."""
    theirs: dict[str, Tensor] = {}
    for place in _places(ModelConfig.from_dict(settings), released):
        theirs |= place.write(weights)
    return {name: tensor.contiguous().clone() for name, tensor in theirs.items()}


def _places(config: ModelConfig, released: bool, experts: str = EXPERTS) -> Iterator[Place]:
    """Each tensor of a checkpoint, with transformers' names or the released ones; `experts` is what holds experts."""
    for ours, theirs in OUTER.items():
        if ours != "head.weight" or not config.tie_embeddings:
            yield Place((ours,), (theirs,))
    for i, kind in enumerate(config.kinds):
        here, there = f"sublayers.{i}.", f"model.layers.{i // 2}."
        yield Place((f"{here}norm.weight",), (there + NORMS[i % 2],))
        joined: dict[str, list[str]] = {}
        for ours, theirs, release in NAMES[kind]:
            name = release.replace(EXPERTS, experts) if released else theirs
            joined.setdefault(name, []).append(f"{here}body.{ours}")
        for theirs, parts in joined.items():
            stacked = "{}" in theirs
            names = [there + theirs.format(e) for e in range(config.experts if stacked else 1)]
            axis = 1 if "experts.gate_up" in theirs else 0
            yield Place(tuple(parts), tuple(names), axis, stacked)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                yield name, opened.get_tensor(name)
