"""A decoder's shape as data. Nothing here imports torch, so that the command line can describe it at once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from .pattern import layers_of

KIMI = {"pattern": "kda*3:mla", "shared_experts": 1, "dense_layers": 1}
KIMI_48B = ":".join(
    ["kda*3:mla"] * 6 + ["kda*2:mla"]
)  # the last layer is full attention, so it is no period of four

SIZES: Mapping[str, Mapping[str, Any]] = {
    "nano": {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 176, "context": 128},
    "tiny": {"dim": 128, "layers": 8, "heads": 4, "kv_heads": 2, "mlp_dim": 352, "context": 256},
    "deep": {"dim": 64, "layers": 24, "heads": 2, "kv_heads": 1, "mlp_dim": 160, "context": 128},
    "small": {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 4, "mlp_dim": 1408, "context": 1024},
    "medium": {"dim": 768, "layers": 24, "heads": 12, "kv_heads": 4, "mlp_dim": 2048, "context": 2048},
    "large": {"dim": 1536, "layers": 28, "heads": 12, "kv_heads": 4, "mlp_dim": 4096, "context": 4096},
    "xl": {"dim": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "mlp_dim": 5632, "context": 4096},
    "ladder-2m": {"dim": 128, "layers": 12, "heads": 2, "kv_heads": 2, "mlp_dim": 352, "context": 1024},
    "ladder-7m": {"dim": 192, "layers": 16, "heads": 3, "kv_heads": 3, "mlp_dim": 512, "context": 1024},
    "ladder-16m": {"dim": 256, "layers": 20, "heads": 4, "kv_heads": 4, "mlp_dim": 704, "context": 1024},
    "ladder-43m": {"dim": 384, "layers": 24, "heads": 6, "kv_heads": 6, "mlp_dim": 1024, "context": 1024},
    "kimi-linear-nano": {
        **KIMI, "dim": 64, "layers": 4, "heads": 2, "kv_heads": 2, "mlp_dim": 192, "context": 64,
        "kda_head_dim": 16, "router_rate": 0.01,
        "experts": 8, "experts_per_token": 2, "expert_scale": 1.4,
    },
    "kimi-linear-tiny": {
        **KIMI, "dim": 256, "layers": 8, "heads": 4, "kv_heads": 4, "mlp_dim": 640, "context": 512,
        "experts": 16, "experts_per_token": 4, "expert_scale": 2.0,
    },
    "kimi-linear-small": {
        **KIMI, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "mlp_dim": 2304, "context": 2048,
        "experts": 64, "experts_per_token": 8, "expert_scale": 2.446,
    },
    "kimi-linear-medium": {
        **KIMI, "dim": 1168, "layers": 16, "heads": 16, "kv_heads": 16, "mlp_dim": 4752, "context": 4096,
        "kda_head_dim": 128, "mla_head_dim": 128, "mla_value_dim": 128, "mla_shared_dim": 64, "mla_latent": 512,
        "experts": 64, "experts_per_token": 8, "expert_scale": 2.446,
    },
    "kimi-linear-48b": {
        **KIMI, "pattern": KIMI_48B, "vocab_size": 163840, "dim": 2304, "layers": 27, "heads": 32, "kv_heads": 32,
        "mlp_dim": 9216, "context": 4096, "norm_eps": 1e-5, "kda_head_dim": 128, "mla_head_dim": 128,
        "mla_value_dim": 128, "mla_shared_dim": 64, "mla_latent": 512,
        "experts": 256, "experts_per_token": 8, "expert_scale": 2.446,
    },
}  # fmt: skip
# What every size decides, by leaving it out if need be; vocabulary and eps are the published model's own.
SIZED = {key for size in SIZES.values() for key in size} - {"vocab_size", "norm_eps"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder: what mixes tokens in each layer, and what mixes channels, is named by `pattern`.

    By default RoPE, grouped-query attention and SwiGLU. `pattern` names each layer's mixer, layers separated by colons
    and repeated until there are as many as `layers`: `kda*3:mla` is three of Kimi Delta Attention for one of MLA. A
    layer may name its feed-forward as well (`kda+mlp`); else that is `moe` where there are experts, after the first
    `dense_layers` layers, and `mlp` otherwise. pattern.py has all of it.

    `shortswa`: each layer begins with attention over the last so many tokens, the sequence-axis rival of a depth
    window (arXiv 2603.16039); its output projection starts at zero. `value_residual`: every attention mixes the first
    one's values into its own, learned weights from 1/2 each (ResFormer, arXiv 2410.17897). `fp32_stream`: under
    autocast the residual stays in fp32; else it has the dtype of the sublayers' outputs. `depth_start`: output
    projections start smaller by sqrt(sublayers).

    Widths that are 0 follow from the others, as in Kimi Linear: a head is as wide as `heads` divide `dim`, MLA's latent
    is four heads wide and its shared key half a head, and the experts of a token are together as wide as an MLP.
    `expert_scale`: factor on the routed experts' weights, which sum to one. `router_rate`: how far a step moves the
    bias of an expert toward an even load.
    """

    vocab_size: int
    dim: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    mlp_dim: int = 352
    context: int = 256
    residual: str = "standard"
    shortswa: int | None = None
    value_residual: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    fp32_stream: bool = False
    depth_start: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = (
        1e-8  # small: a read that averages n sources has an n^2 smaller mean square than their sum
    )
    pattern: str = "attention"
    kda_heads: int = 0
    kda_head_dim: int = 0
    kda_conv: int = 4
    kda_gate: str = "softplus"
    # Not small: a head reads almost zero from an empty state, which would make its gradient huge.
    kda_norm_eps: float = 1e-5
    mla_latent: int = 0
    mla_head_dim: int = 0
    mla_shared_dim: int = 0
    mla_value_dim: int = 0
    experts: int = 0
    experts_per_token: int = 2
    expert_dim: int = 0
    shared_experts: int = 1
    expert_scale: float = 1.0
    dense_layers: int = 0
    router_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "dim",
            "layers",
            "heads",
            "kv_heads",
            "mlp_dim",
            "context",
            "kda_conv",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shortswa is not None and not 2 <= self.shortswa <= self.context:
            raise ValueError(
                f"shortswa counts tokens, the current one included, and must lie between 2 and the context of "
                f"{self.context}, got {self.shortswa}"
            )
        kinds = set(self.kinds)
        if kinds & {"attention", "shortswa"}:
            self._check_attention()
        if "attention" not in kinds and self.value_residual:
            raise ValueError(
                f"value_residual needs a layer of attention, and the pattern is '{self.pattern}'"
            )
        self._check_widths(kinds)
        if "moe" in kinds:
            self._check_experts()
        for name in ("rope_theta", "norm_eps", "kda_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def _check_attention(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"heads must divide dim into heads of even width (RoPE turns pairs): dim {self.dim}, heads {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads: heads {self.heads}, kv_heads {self.kv_heads}"
            )

    def _check_widths(self, kinds: set[str]) -> None:
        """Those of KDA and MLA: given, or following from heads that divide dim."""
        own = {
            "kda": ("kda_heads", "kda_head_dim"),
            "mla": ("mla_head_dim", "mla_value_dim", "mla_shared_dim", "mla_latent"),
        }
        for name in (name for names in own.values() for name in names):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 1, or 0 to follow from dim and heads, got {getattr(self, name)}"
                )
        for kind in sorted(kinds & own.keys()):
            names = [name for name in own[kind] if name != "kda_heads"]
            if not all(getattr(self, name) for name in names) and (
                self.dim % self.heads or self.dim // self.heads < 2
            ):
                raise ValueError(
                    f"heads must divide dim into heads of width 2 or more, unless {' and '.join(names)} are given: "
                    f"dim {self.dim}, heads {self.heads}"
                )
        if "kda" in kinds and self.kda_width > 256:
            raise ValueError(
                f"kda_head_dim must be at most 256, which is what kernels for it take, got {self.kda_width}"
            )
        if self.kda_gate not in ("softplus", "bounded"):
            raise ValueError(f"kda_gate must be 'softplus' or 'bounded', got '{self.kda_gate}'")

    def _check_experts(self) -> None:
        if self.experts < 2:
            raise ValueError(f"a layer of experts needs experts of 2 or more, got {self.experts}")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must lie between 1 and the {self.experts} experts, got {self.experts_per_token}"
            )
        for name in ("expert_dim", "shared_experts", "dense_layers", "router_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.expert_width < 1:
            raise ValueError(
                f"mlp_dim {self.mlp_dim} is too narrow for {self.experts_per_token} + {self.shared_experts} experts a "
                "token: give expert_dim"
            )
        if not self.expert_scale > 0:
            raise ValueError(f"expert_scale must be positive, got {self.expert_scale}")

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
        named = any("shortswa" in layer for layer in layers)
        if named and self.shortswa is None:
            raise ValueError(
                f"the pattern '{self.pattern}' names shortswa: give its window too, such as shortswa 16"
            )
        return (
            layers
            if named or self.shortswa is None
            else tuple(("shortswa", *layer) for layer in layers)
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each sublayer is, in order."""
        return tuple(kind for layer in self.layout for kind in layer)

    @property
    def layer_of(self) -> tuple[int, ...]:
        """Which layer each sublayer belongs to."""
        return tuple(number for number, layer in enumerate(self.layout) for _ in layer)

    @property
    def sublayers(self) -> int:
        return len(self.kinds)

    @classmethod
    def named(cls, size: str, **overrides: Any) -> "ModelConfig":
        if size not in SIZES:
            raise ValueError(f"unknown size '{size}'. Valid sizes: {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown model settings: {', '.join(unknown)}. Valid settings: {', '.join(sorted(known))}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
