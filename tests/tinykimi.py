"""Kimi Linear so small that a step takes milliseconds: KDA and MLA three to one, experts in all layers but one."""

from typing import Any

KIMI: dict[str, Any] = {
    "pattern": "kda*3:mla",
    "heads": 4,
    "kv_heads": 4,
    "mlp_dim": 48,
    "experts": 4,
    "experts_per_token": 2,
    "expert_scale": 1.5,
    "dense_layers": 1,
}
