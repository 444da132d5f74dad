"""The shape of a decoder: the one class of settings of a model, filled by flags, files and Python.

Nothing here imports torch, so that the command line can describe a model at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self

from headwater.errors import SettingError, nearest
from headwater.schema import Section, setting

from .pattern import layers_of

# The last layer is full attention, so it is no period of four.
KIMI_48B = ":".join(["kda*3:mla"] * 6 + ["kda*2:mla"])

SHAPE = ("dim", "layers", "heads", "kv_heads", "mlp_dim", "context")
SHAPES = {
    "nano": (64, 4, 4, 2, 176, 128),
    "tiny": (128, 8, 4, 2, 352, 256),
    "deep": (64, 24, 2, 1, 160, 128),
    "small": (512, 12, 8, 4, 1408, 1024),
    "medium": (768, 24, 12, 4, 2048, 2048),
    "large": (1536, 28, 12, 4, 4096, 4096),
    "xl": (2048, 24, 16, 8, 5632, 4096),
    "ladder-2m": (128, 12, 2, 2, 352, 1024),
    "ladder-7m": (192, 16, 3, 3, 512, 1024),
    "ladder-16m": (256, 20, 4, 4, 704, 1024),
    "ladder-43m": (384, 24, 6, 6, 1024, 1024),
    "kimi-linear-nano": (64, 4, 2, 2, 192, 64),
    "kimi-linear-tiny": (256, 8, 4, 4, 640, 512),
    "kimi-linear-small": (768, 12, 12, 12, 2304, 2048),
    "kimi-linear-medium": (1168, 16, 16, 16, 4752, 4096),
    "kimi-linear-48b": (2304, 27, 32, 32, 9216, 4096),
}
# The experts of a Kimi Linear, how many a token meets, and the factor on their sum.
EXPERTS = ("experts", "experts_per_token", "expert_scale")
KIMI_EXPERTS = {
    "kimi-linear-nano": (8, 2, 1.4),
    "kimi-linear-tiny": (16, 4, 2.0),
    "kimi-linear-small": (64, 8, 2.446),
    "kimi-linear-medium": (64, 8, 2.446),
    "kimi-linear-48b": (256, 8, 2.446),
}
KIMI = {"pattern": "kda*3:mla", "shared_experts": 1, "dense_layers": 1}
WIDE_MLA = {"mla_head_dim": 128, "mla_value_dim": 128, "mla_shared_dim": 64, "mla_latent": 512}


def _sizes() -> dict[str, dict[str, Any]]:
    sizes: dict[str, dict[str, Any]] = {}
    for name, shape in SHAPES.items():
        sizes[name] = dict(zip(SHAPE, shape, strict=True))
        if name in KIMI_EXPERTS:
            experts = dict(zip(EXPERTS, KIMI_EXPERTS[name], strict=True))
            sizes[name].update(KIMI, **experts)
    sizes["kimi-linear-nano"].update(kda_head_dim=16, router_rate=0.01)
    sizes["kimi-linear-medium"].update(WIDE_MLA, kda_head_dim=128)
    published = {"pattern": KIMI_48B, "vocab_size": 163840, "norm_eps": 1e-5, "kda_head_dim": 128}
    sizes["kimi-linear-48b"].update(published, **WIDE_MLA)
    return sizes


SIZES: Mapping[str, Mapping[str, Any]] = _sizes()
# A size decides all of these, where need be by their defaults. Vocabulary and eps are not among
# them: they belong to the published model.
SIZED = {key for size in SIZES.values() for key in size} - {"vocab_size", "norm_eps"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, section="model"):
    """A pre-norm decoder: `pattern` names what mixes tokens, and what mixes channels, in each
    layer.

    By default RoPE, grouped-query attention and SwiGLU. `pattern` names the mixer of each layer.
    Colons separate the layers, and they repeat until there are as many as `layers`: `kda*3:mla` is
    three of Kimi Delta Attention for one of MLA. A layer may name its feed-forward as well
    (`kda+mlp`). Otherwise it is `moe` where there are experts, after the first `dense_layers`
    layers, and `mlp` in all other layers. pattern.py has the whole syntax.

    `ModelConfig.named("nano", residual="attnres-block")` is a named size with changes.
    """

    vocab_size: int = setting(0, least=0)
    """Number of rows of the embedding. 0 takes it from the tokenizer, rounded up to a multiple
    of 64."""
    dim: int = setting(128, least=1)
    """Width of the residual stream, in channels."""
    layers: int = setting(8, least=1)
    """Number of decoder layers. Each has two sublayers, a mixer such as attention and an MLP."""
    heads: int = setting(4, least=1)
    """Number of query heads. Must divide dim into an even number of channels."""
    kv_heads: int = setting(2, least=1)
    """Number of heads of keys and values. Must divide heads."""
    mlp_dim: int = setting(352, least=1)
    """Hidden width of an MLP, in channels."""
    context: int = setting(256, least=1)
    """Length of a training window, in tokens."""
    residual: str = "standard"
    """Residual that connects the depth, with its options, such as attnres-block:block=4.
    headwater residuals lists them."""
    shortswa: int | None = setting(None, least=2)
    """Number of last tokens, the current one included, that a short attention at the start of
    each layer sees. Without it there is no such attention."""
    value_residual: bool = False
    """Mix the values of the first attention into those of every other one, with learned weights
    that start at 1/2."""
    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of every head, which is steadier at high learning
    rates."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the output head."""
    fp32_stream: bool = False
    """Keep the residual stream in fp32 on a GPU: more exact sums, twice the bytes. Otherwise it
    is in bf16, like the sublayers."""
    depth_start: bool = True
    """Divide the initial output projections by the square root of the number of sublayers."""
    rope_theta: float = setting(10000.0, above=0)
    """Base of the wavelengths of the rotary embedding."""
    # Small: a read that averages n sources has an n^2 smaller mean square than their sum.
    norm_eps: float = setting(1e-8, above=0)
    """Epsilon of every RMSNorm."""
    pattern: str = "attention"
    """Mixers of the layers in order, one period or all: attention, kda or mla, as in
    kda:kda:kda:mla or kda*3:mla. A layer may name its feed-forward too: kda+mlp."""
    kda_heads: int = setting(0, least=0)
    """Number of heads of Kimi Delta Attention. 0 takes as many as heads."""
    kda_head_dim: int = setting(0, least=0)
    """Width of a head of Kimi Delta Attention, in channels. 0 takes dim / heads."""
    kda_conv: int = setting(4, least=1)
    """Number of tokens that the short convolutions of Kimi Delta Attention see."""
    kda_gate: Literal["softplus", "bounded"] = "softplus"
    """Decay of Kimi Delta Attention: softplus is that of Kimi Linear; bounded, that of Kimi K3,
    never falls below exp(-5) per token."""
    # Not small: a head reads almost zero from an empty state, which would make its gradient huge.
    kda_norm_eps: float = setting(1e-5, above=0)
    """Epsilon of the norm over what a head of Kimi Delta Attention reads."""
    mla_latent: int = setting(0, least=0)
    """Width of the latent that MLA keeps of a token for all heads, in channels. 0 takes the
    width of four heads."""
    mla_head_dim: int = setting(0, least=0)
    """Width of a head's own part of the queries and keys of MLA, in channels. 0 takes dim /
    heads."""
    mla_shared_dim: int = setting(0, least=0)
    """Width of the key that the heads of MLA share, in channels. 0 takes half of a head."""
    mla_value_dim: int = setting(0, least=0)
    """Width of a head's values in MLA, in channels. 0 takes dim / heads."""
    experts: int = setting(0, least=0)
    """Number of routed experts. Above 0, they replace the MLP in the layers after dense_layers."""
    experts_per_token: int = setting(2, least=1)
    """Number of routed experts that a token is sent to."""
    expert_dim: int = setting(0, least=0)
    """Hidden width of one expert, in channels. 0 takes mlp_dim / (experts_per_token +
    shared_experts)."""
    shared_experts: int = setting(1, least=0)
    """Number of experts, besides the routed ones, that see every token."""
    expert_scale: float = setting(1.0, above=0)
    """Factor on the weights of a token's experts, which sum to one."""
    dense_layers: int = setting(0, least=0)
    """Number of first layers that keep an MLP in place of experts."""
    router_rate: float = setting(1e-3, least=0)
    """Step by which the bias of each expert moves toward an even load. 0 leaves the biases at
    zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortswa is not None:
            within = self.shortswa <= self.context
            self.require(within, "shortswa", f"must be at most the context, {self.context}")
        # Only the widths of parts that the pattern names must fit.
        kinds = set(self.kinds)
        attends = "attention" in kinds
        if attends or "shortswa" in kinds:
            # RoPE turns pairs of channels.
            even = self.dim % (2 * self.heads) == 0
            self.require(
                even, "heads", f"must divide dim ({self.dim}) into an even number of channels"
            )
            grouped = self.heads % self.kv_heads == 0
            self.require(grouped, "kv_heads", f"must divide heads ({self.heads})")
        self.require(
            attends or not self.value_residual,
            "value_residual",
            f"must be false without a layer of attention in the pattern '{self.pattern}'",
        )
        if "kda" in kinds:
            self._require_head_width("kda_head_dim")
            self.require(
                self.kda_width <= 256, "kda_head_dim", "must be at most 256, as kernels take"
            )
        if "mla" in kinds:
            self._require_head_width(
                "mla_head_dim", "mla_value_dim", "mla_shared_dim", "mla_latent"
            )
        if "moe" in kinds:
            self._require_experts()

    def _require_head_width(self, *widths: str) -> None:
        """Refuse widths that have to follow from dim and heads where they cannot."""
        if all(getattr(self, name) for name in widths):
            return
        divides = self.dim % self.heads == 0 and self.dim >= 2 * self.heads
        must = (
            f"must divide dim ({self.dim}) into heads of width 2 or more unless "
            f"{' and '.join(widths)} are given"
        )
        self.require(divides, "heads", must)

    def _require_experts(self) -> None:
        self.require(self.experts >= 2, "experts", "must be at least 2 for a mixture")
        few = self.experts_per_token <= self.experts
        self.require(few, "experts_per_token", f"must be at most the experts, {self.experts}")
        chosen = self.experts_per_token + self.shared_experts
        must = f"must be at least {chosen}, the experts of a token, unless expert_dim is given"
        self.require(self.expert_width >= 1, "mlp_dim", must)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kda_width(self) -> int:
        """Channels of one head of KDA."""
        return self.kda_head_dim or self.head_dim

    @property
    def expert_width(self) -> int:
        """Hidden channels of one expert."""
        return self.expert_dim or self.mlp_dim // (self.experts_per_token + self.shared_experts)

    @cached_property
    def layout(self) -> tuple[tuple[str, ...], ...]:
        """The sublayers of each layer."""
        layers = layers_of(self.pattern, self.layers, experts=self.experts, dense=self.dense_layers)
        if any("shortswa" in layer for layer in layers):
            must = f"must be given, as 16, because the pattern '{self.pattern}' names it"
            self.require(self.shortswa is not None, "shortswa", must)
            return layers
        if self.shortswa is None:
            return layers
        return tuple(("shortswa", *layer) for layer in layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the sublayers, in order."""
        return tuple(kind for layer in self.layout for kind in layer)

    @property
    def layer_of(self) -> tuple[int, ...]:
        """The number of the layer that each sublayer belongs to."""
        return tuple(number for number, layer in enumerate(self.layout) for _ in layer)

    @property
    def sublayers(self) -> int:
        return len(self.kinds)

    @classmethod
    def named(cls, size: str, **changes: Any) -> Self:
        """Return a named size with changes: `ModelConfig.named("nano", layers=6)`."""
        return cls(**{**shape_of(size), **changes})

    def over(self, values: Mapping[str, Any]) -> Self:
        """Return this model with other settings. `size` sets the whole shape, the others go over
        it."""
        changes = dict(values)
        if "size" in changes:
            shape = shape_of(changes.pop("size"))
            declared = {setting.name: setting.default for setting in fields(self)}
            defaults = {name: declared[name] for name in SIZED}
            changes = {**defaults, **shape, **changes}
        return super().over(changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls().over(values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(size: str) -> Mapping[str, Any]:
    if size not in SIZES:
        raise SettingError("model.size", f"must be a named size: {nearest(size, SIZES)}", size)
    return SIZES[size]
