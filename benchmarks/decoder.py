"""A Llama-shaped training step (attention and SwiGLU, forward and backward), plain against Block Attention Residuals.

Bodies are compiled once and shared by all layers; so is the plain residual's add and norm, its best case. The residual
under test runs between compiled bodies as it is. The loss is a dot product: an output head would only dilute.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.residuals import build

from .measure import device_ms, paired, peak_gib, times

LAYERS, TOKENS, CONTEXT, BLOCKS, HEAD = 24, 16384, 4096, 8, 128
OWN = (  # our kernels
    "_write_addresses", "_prepare", "_score", "_score_backward", "_softmax", "_mix", "_mix_backward", "_merge",
    "_merge_backward", "_gather",
)  # fmt: skip


class Body(nn.Module):
    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, dim // HEAD
        wide = 3 * dim if kind == "attention" else 2 * (-(-8 * dim // 3 // 256) * 256)
        self.enter = nn.Linear(dim, wide, bias=False)
        self.leave = nn.Linear(dim if kind == "attention" else wide // 2, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (
            attention(x, self.enter.weight, self.leave.weight)
            if self.kind == "attention"
            else mlp(x, self.enter.weight, self.leave.weight)
        )


@torch.compile(dynamic=False)
def attention(x: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    q, k, v = (
        F.linear(x, enter).view(-1, CONTEXT, 3, x.shape[-1] // HEAD, HEAD).permute(2, 0, 3, 1, 4)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(x.shape), leave)


@torch.compile(dynamic=False)
def mlp(x: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
    gate, up = F.linear(x, enter).chunk(2, -1)
    return F.linear(F.silu(gate) * up, leave)


@torch.compile(dynamic=False)
def add_norm(h: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = h + y
    return h, F.rms_norm(h, h.shape[-1:], weight, 1e-6)


class Model(nn.Module):
    def __init__(self, dim: int, spec: str) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(
            Body(dim, kind) for _ in range(LAYERS) for kind in ("attention", "mlp")
        )
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2 * LAYERS + 1))
        self.residual = build(spec, dim, 2 * LAYERS)
        self.plain = spec == "standard"

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            h, x = x, self.norms[0](x)
            for body, norm in zip(self.bodies, self.norms[1:]):
                h, x = add_norm(h, body(x), norm.weight)
            return x
        state = self.residual.begin(x)
        for i, body in enumerate(self.bodies):
            h, state = self.residual.read(state, i, norm=self.norms[i])
            state = self.residual.write(state, i, body(h))
        return self.residual.end(state, norm=self.norms[-1])


def decoder(dim: int) -> dict[str, Any]:
    """Both take turns in one process, about a second each; the overhead is the median over rounds. The GPU runs at its
    power limit here, and its clock wanders by more than the difference: a few rounds do not show it."""
    result: dict[str, Any] = {
        "dim": dim,
        "layers": LAYERS,
        "tokens": TOKENS,
        "context": CONTEXT,
        "blocks": BLOCKS,
    }
    steps = {}
    for name, spec in (
        ("plain", "standard"),
        ("headwater", f"attnres-block:block={2 * LAYERS // BLOCKS}"),
    ):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Model(dim, spec).bfloat16()
            x = torch.randn(TOKENS, dim).bfloat16().requires_grad_()
            seed = torch.randn(TOKENS, dim).bfloat16()

        def both(model: Any = model, x: Any = x, seed: Any = seed) -> None:
            model(x).backward(seed)
            model.zero_grad(set_to_none=True)
            x.grad = None

        both()
        # With the plain model's weights still there for the second
        result[f"{name}_peak_gib"] = peak_gib(both)
        result[f"{name}_device_ms"] = device_ms(both, OWN)
        steps[name] = both
    calls = max(1, round(1e3 / times(steps["plain"], repeats=3)["ms"]))
    result |= paired(steps["plain"], steps["headwater"], repeats=15, calls=calls)
    result["overhead_percent"] = 100 * result["difference_ms"] / result["plain_ms"]
    return result
