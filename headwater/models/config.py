"""A decoder's shape as data. Nothing here imports torch, so that the command line can describe it at once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

SIZES: Mapping[str, Mapping[str, int]] = {
    "nano": {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 176, "context": 128},
    "tiny": {"dim": 128, "layers": 8, "heads": 4, "kv_heads": 2, "mlp_dim": 352, "context": 256},
    "deep": {"dim": 64, "layers": 24, "heads": 2, "kv_heads": 1, "mlp_dim": 160, "context": 128},
    "small": {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 4, "mlp_dim": 1408, "context": 1024},
    "medium": {"dim": 768, "layers": 24, "heads": 12, "kv_heads": 4, "mlp_dim": 2048, "context": 2048},
    "large": {"dim": 1536, "layers": 28, "heads": 12, "kv_heads": 4, "mlp_dim": 4096, "context": 4096},
    "xl": {"dim": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "mlp_dim": 5632, "context": 4096},
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    `shortswa`: each layer begins with attention over the last so many tokens, the sequence-axis rival of a depth
    window (arXiv 2603.16039); its output projection starts at zero. `value_residual`: every attention mixes the first
    one's values into its own, learned weights from 1/2 each (ResFormer, arXiv 2410.17897). `fp32_stream`: under
    autocast the residual stays in fp32; else it has the dtype of the sublayers' outputs.
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
    rope_theta: float = 10000.0
    norm_eps: float = 1e-8  # small: a read that averages n sources has an n^2 smaller mean square than their sum

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "mlp_dim", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shortswa is not None and not 2 <= self.shortswa <= self.context:
            raise ValueError(
                f"shortswa counts tokens, the current one included, and must lie between 2 and the context of "
                f"{self.context}, got {self.shortswa}"
            )
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"heads must divide dim into heads of even width (RoPE turns pairs): dim {self.dim}, heads {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: heads {self.heads}, kv_heads {self.kv_heads}")
        if not (self.rope_theta > 0 and self.norm_eps > 0):
            raise ValueError(f"rope_theta and norm_eps must be positive, got {self.rope_theta} and {self.norm_eps}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each sublayer is, in order."""
        layer = ("attention", "mlp") if self.shortswa is None else ("shortswa", "attention", "mlp")
        return layer * self.layers

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
