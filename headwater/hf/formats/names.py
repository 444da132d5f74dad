"""The names of tensors elsewhere: one table, read in both directions.

A decoder of headwater has one name for each tensor. transformers has another, the released files of
Kimi Linear a third, and releases with Attention Residuals have their own names for the residual.
A `Place` is one row: native names, which are headwater's, and the foreign ones.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwater.errors import UserError, check_fit
from headwater.models import ModelConfig

OUTER = """
    embedding.weight  model.embed_tokens.weight
    norm.weight       model.norm.weight
    head.weight       lm_head.weight
"""
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")  # before attention, the MLP

# For each kind of body: the name here, in transformers, and in Kimi Linear's released files where
# that is another. Tensors with the same name there are joined in one. A name with braces stands for
# one tensor an expert, which are stacked here.
BODIES = {
    "attention": """
        query.weight       self_attn.q_proj.weight
        key.weight         self_attn.k_proj.weight
        value.weight       self_attn.v_proj.weight
        output.weight      self_attn.o_proj.weight
        query_norm.weight  self_attn.q_norm.weight
        key_norm.weight    self_attn.k_norm.weight
    """,
    "kda": """
        query.weight       self_attn.q_proj.weight
        key.weight         self_attn.k_proj.weight
        value.weight       self_attn.v_proj.weight
        query_conv.weight  self_attn.conv1d.weight               self_attn.q_conv1d.weight
        key_conv.weight    self_attn.conv1d.weight               self_attn.k_conv1d.weight
        value_conv.weight  self_attn.conv1d.weight               self_attn.v_conv1d.weight
        decay_down.weight  self_attn.forget_gate.f_a_proj.weight self_attn.f_a_proj.weight
        decay_up.weight    self_attn.forget_gate.f_b_proj.weight self_attn.f_b_proj.weight
        decay.rate         self_attn.forget_gate.A_log           self_attn.A_log
        decay.bias         self_attn.forget_gate.dt_bias         self_attn.dt_bias
        beta.weight        self_attn.b_proj.weight
        gate_down.weight   self_attn.g_a_proj.weight
        gate_up.weight     self_attn.g_b_proj.weight
        norm.weight        self_attn.o_norm.weight
        output.weight      self_attn.o_proj.weight
    """,
    "mla": """
        query.weight   self_attn.q_proj.weight
        down.weight    self_attn.kv_a_proj_with_mqa.weight
        norm.weight    self_attn.kv_a_layernorm.weight
        up.weight      self_attn.kv_b_proj.weight
        output.weight  self_attn.o_proj.weight
    """,
    "mlp": """
        gate.weight    mlp.gate_proj.weight
        up.weight      mlp.up_proj.weight
        output.weight  mlp.down_proj.weight
    """,
    "moe": """
        router.weight         mlp.gate.weight                      block_sparse_moe.gate.weight
        router.bias           mlp.gate.e_score_correction_bias     block_sparse_moe.gate.e_score_correction_bias
        experts.gate          mlp.experts.gate_up_proj             block_sparse_moe.experts.{}.w1.weight
        experts.up            mlp.experts.gate_up_proj             block_sparse_moe.experts.{}.w3.weight
        experts.output        mlp.experts.down_proj                block_sparse_moe.experts.{}.w2.weight
        shared.gate.weight    mlp.shared_experts.gate_proj.weight  block_sparse_moe.shared_experts.gate_proj.weight
        shared.up.weight      mlp.shared_experts.up_proj.weight    block_sparse_moe.shared_experts.up_proj.weight
        shared.output.weight  mlp.shared_experts.down_proj.weight  block_sparse_moe.shared_experts.down_proj.weight
    """,
}
# There it has axes of one besides.
SHAPES = {"decay.rate": (1, 1, -1, 1)}
EXPERTS, MLP = "block_sparse_moe.", "mlp."


@dataclass(frozen=True)
class Place:
    """Native tensors, and their names elsewhere: several are joined there, or one is apart."""

    native: tuple[str, ...]
    foreign: tuple[str, ...]
    axis: int = 0  # along which several are joined there
    stacked: bool = False  # there is a foreign tensor for each expert
    shape: tuple[int, ...] = ()  # there, of a tensor that has one axis here

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read native tensors by name from foreign ones."""
        tensor = tensors[self.foreign[0]]
        if self.stacked:
            tensor = torch.stack([tensors[name] for name in self.foreign])
        if self.shape:
            tensor = tensor.reshape(-1)
        parts = tensor.chunk(len(self.native), self.axis)
        return {name: part.contiguous() for name, part in zip(self.native, parts, strict=True)}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write foreign tensors by name from native ones."""
        tensor = torch.cat([tensors[name] for name in self.native], self.axis)
        if self.shape:
            tensor = tensor.view(self.shape)
        parts = [tensor]
        if self.stacked:
            parts = [part.clone() for part in tensor.unbind()]
        return dict(zip(self.foreign, parts, strict=True))


def decoder_places(config: ModelConfig, released: bool = False) -> Iterator[Place]:
    """Yield the places of a decoder's tensors, but for its residual's.

    Arguments:
        config: the decoder's.
        released: with the names of Kimi Linear's released files; else those of transformers.
    """
    for native, foreign in _rows(OUTER, released):
        if native != "head.weight" or not config.tie_embeddings:
            yield Place((native,), (foreign,))
    for i, kind in enumerate(config.kinds):
        here, there = f"sublayers.{i}.", f"model.layers.{i // 2}."
        yield Place((f"{here}norm.weight",), (there + NORMS[i % 2],))
        # Native tensors with one foreign name are one place.
        joined: dict[str, list[str]] = {}
        for native, foreign in _rows(BODIES[kind], released):
            joined.setdefault(foreign, []).append(native)
        for foreign, parts in joined.items():
            stacked = "{}" in foreign
            numbers = range(config.experts if stacked else 1)
            yield Place(
                native=tuple(f"{here}body.{part}" for part in parts),
                foreign=tuple(there + foreign.format(number) for number in numbers),
                axis=1 if foreign.endswith("gate_up_proj") else 0,
                stacked=stacked,
                shape=SHAPES.get(parts[0], ()),
            )


def _rows(table: str, released: bool) -> list[tuple[str, str]]:
    """The pairs of names in a table, the native one first."""
    rows = [line.split() for line in table.strip().splitlines()]
    return [(row[0], row[-1] if released else row[1]) for row in rows]


def _residual_places(names: Iterable[str]) -> list[Place]:
    """The residual's tensors have the same names under the body of a model of transformers."""
    return [Place((name,), (f"model.{name}",)) for name in names if name.startswith("residual.")]


def read_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Name the tensors of a checkpoint, of transformers or released, as a decoder does.

    Raises ValueError for a tensor that is missing, and for one that has no place.
    """
    # transformers writes dense layers under the name of experts too.
    tensors = {name.replace(EXPERTS, MLP): tensor for name, tensor in tensors.items()}
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    # The names say themselves which of the two layouts a file has.
    released = any(".experts.0." in name or ".q_conv1d." in name for name in tensors)
    places = _residual_places(name.removeprefix("model.") for name in tensors)
    for place in decoder_places(config, released):
        foreign = tuple(name.replace(EXPERTS, MLP) for name in place.foreign)
        places.append(replace(place, foreign=foreign))
    expected = [name for place in places for name in place.foreign]
    what = f"the weights are not those of the layers {config.pattern}"
    check_fit(dict.fromkeys(expected, ()), dict.fromkeys(tensors, ()), what)
    native: dict[str, Tensor] = {}
    for place in places:
        native |= place.read(tensors)
    return native


def write_names(
    weights: Mapping[str, Tensor], config: ModelConfig, released: bool = False
) -> dict[str, Tensor]:
    """Name a decoder's tensors as a checkpoint does. What has no place keeps its name."""
    foreign = dict(weights)
    for place in [*decoder_places(config, released), *_residual_places(weights)]:
        if place.native[0] in weights:
            foreign |= place.write(weights)
            for name in place.native:
                del foreign[name]
    return foreign


@dataclass(frozen=True)
class Release:
    """Block Attention Residuals as they are released elsewhere.

    A release keeps, for each sublayer and for the output, a projection of shape (1, D) and the
    weight of a norm, (D,): `<attention>_proj` and `<attention>_norm` in each layer, and so on. Here
    they are the query and the key weight of a read. The first read has one source, so here it has
    no parameters. Releases carry a pair that nothing depends on, which is written as the zeros and
    ones it began with.
    """

    attention: str
    mlp: str
    output: str
    block_field: str  # of its config
    block_unit: int  # sublayers in one unit of that field
    eps_fields: tuple[str, ...]
    # Parts of the other names: the release's, and transformers'
    renames: tuple[tuple[str, str], ...] = ()

    def block(self, config: Mapping[str, Any]) -> int:
        """Sublayers in a block."""
        return self.block_unit * int(config[self.block_field])

    def eps(self, config: Mapping[str, Any]) -> float:
        return float(next(config[name] for name in self.eps_fields if name in config))

    def places(self, last: int, prefix: str) -> list[Place]:
        """The places of reads 0 to `last`, which is the output's: of each its query and key weight."""
        # Sublayers take turns: attention, MLP.
        sites = [f"layers.{i // 2}.{(self.attention, self.mlp)[i % 2]}" for i in range(last)]
        places = []
        for read, site in enumerate([*sites, self.output]):
            native, foreign = f"{prefix}residual.reads.{read}.", f"{prefix}{site}"
            places.append(Place((f"{native}query",), (f"{foreign}_proj.weight",), shape=(1, -1)))
            places.append(Place((f"{native}key_weight",), (f"{foreign}_norm.weight",)))
        return places


# fla counts `attnres_block_size` in sublayers, as headwater does.
FLA = Release(
    attention="attn_res",
    mlp="mlp_res",
    output="res",
    block_field="attnres_block_size",
    block_unit=1,
    eps_fields=("norm_eps",),
    renames=(
        (".embeddings.", ".embed_tokens."),
        (".attn.", ".self_attn."),
        (".attn_norm.", ".input_layernorm."),
        (".mlp_norm.", ".post_attention_layernorm."),
    ),
)
# Kimi K3 counts `attn_res_block_size` in decoder layers.
KIMI_K3 = Release(
    attention="self_attention_res",
    mlp="mlp_res",
    output="output_attn_res",
    block_field="attn_res_block_size",
    block_unit=2,
    eps_fields=("rms_norm_eps", "norm_eps"),
)


def from_release(
    weights: Mapping[str, Tensor], release: Release, prefix: str = "model."
) -> dict[str, Tensor]:
    """Returns the `weights` of a `release` under the names that they have here.

    `prefix` is the path of the body in the model. Raises `headwater.errors.UserError` if the
    parameters of a read are missing, such as those of the output.
    """
    places = release.places(sublayers_in(weights, release, prefix), prefix)
    foreign = {place.foreign[0] for place in places}
    # A read that is missing would silently stay at its start.
    missing = sorted(foreign - weights.keys())
    if missing:
        raise UserError(
            f"the weights have no '{missing[0]}': without all its reads a model of this kind is broken"
        )
    native: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name not in foreign:
            native[_renamed(name, release.renames)] = tensor
    # The first pair is left out: that read has one source.
    for place in places[2:]:
        native |= place.read(weights)
    return native


def to_release(
    weights: Mapping[str, Tensor], release: Release, prefix: str = "model."
) -> dict[str, Tensor]:
    """Returns our `weights` under the names of a `release`.

    `prefix` is the path of the body in the model. Queries are taken as they are, which is right for
    `scale=one`, the default: a release has no other.
    """
    reads = [name for name in weights if name.startswith(f"{prefix}residual.reads.")]
    numbers = [int(name.split(".")[-2]) for name in reads]
    places = release.places(max(numbers), prefix)
    native = {place.native[0] for place in places}
    foreign: dict[str, Tensor] = {}
    back = [(plain, part) for part, plain in release.renames]
    for name, tensor in weights.items():
        if name not in native:
            foreign[_renamed(name, back)] = tensor
    for place in places[2:]:
        foreign |= place.write(weights)
    # The first pair is written as it began, in the shape and dtype of the second.
    (query, key_weight), (its_query, its_key_weight) = places[:2], places[2:4]
    foreign[query.foreign[0]] = torch.zeros_like(foreign[its_query.foreign[0]])
    foreign[key_weight.foreign[0]] = torch.ones_like(foreign[its_key_weight.foreign[0]])
    return foreign


def _renamed(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for before, after in parts:
        name = name.replace(before, after)
    return name


def sublayers_in(weights: Iterable[str], release: Release, prefix: str) -> int:
    """Count the sublayers that have a read in the weights of a release."""
    site = rf"{re.escape(prefix)}layers\.\d+\.({release.attention}|{release.mlp})_proj\.weight"
    return sum(re.fullmatch(site, name) is not None for name in weights)
