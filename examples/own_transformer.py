"""Attention Residuals in a Transformer of your own: three lines change.

    python examples/own_transformer.py [RESIDUAL]        # any name that `headwater residuals` lists

The model learns to copy: the second half of each sequence repeats the first.
"""

import sys

import torch
from torch import Tensor, nn

import headwater


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.outer = heads, nn.Linear(dim, dim)
        self.inner = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor:
        reads = (
            x if isinstance(x, tuple) else (x, x, x)
        )  # muddformer reads for query, key and value apart
        q, k, v = (
            f(read).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, read in zip(self.inner, reads)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(
        self, residual: str, vocab: int = 16, dim: int = 64, layers: int = 3, context: int = 32
    ) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        mlp = lambda: nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))  # noqa: E731
        self.bodies = nn.ModuleList(
            body for _ in range(layers) for body in (Attention(dim, 4), mlp())
        )
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers + 1))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.residual = headwater.build(residual, dim=dim, sublayers=2 * layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        state = self.residual.begin(x)  # was: h = x
        for i, body in enumerate(self.bodies):
            read, state = self.residual.read(state, i, norm=self.norms[i])  # was: norms[i](h)
            state = self.residual.write(state, i, body(read))  # was: h = h + ...
        return self.head(self.residual.end(state, norm=self.norms[-1]))  # was: norms[-1](h)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Transformer(sys.argv[1] if len(sys.argv) > 1 else "attnres-block:block=2")
    optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=3e-3, weight_decay=0.1))
    for step in range(1, 101):
        tokens = torch.randint(16, (16, 8)).repeat(1, 2)
        losses = nn.functional.cross_entropy(
            model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss of the repeated half {losses[:, 8:].mean():.3f}")
