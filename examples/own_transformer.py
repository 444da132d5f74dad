"""Attention Residuals in a Transformer of your own: one module, and four lines of forward.

    python examples/own_transformer.py [RESIDUAL]        # any name that `headwater residuals` lists

The model learns to copy: the second half of each sequence repeats the first.
"""

import sys

import torch
from torch import Tensor, nn

import headwater


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor:
        # Some residuals, such as muddformer, read one input each for query, key and value.
        q, k, v = x if isinstance(x, tuple) else (x, x, x)
        mask = nn.Transformer.generate_square_subsequent_mask(q.shape[1])
        return super().forward(q, k, v, attn_mask=mask, is_causal=True, need_weights=False)[0]


def mlp(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Transformer(nn.Module):
    def __init__(self, residual: str, vocab: int = 16, dim: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, dim), nn.Embedding(32, dim)
        pairs = [(Attention(dim, 4, batch_first=True), mlp(dim)) for _ in range(layers)]
        self.sublayers = nn.ModuleList(sublayer for pair in pairs for sublayer in pair)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers + 1))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.residual = headwater.build(residual, dim=dim, sublayers=2 * layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        state = self.residual.begin(x)  # was: h = x
        for i, sublayer in enumerate(self.sublayers):
            x, state = self.residual.read(state, i, norm=self.norms[i])  # was: x = norms[i](h)
            state = self.residual.write(state, i, sublayer(x))  # was: h = h + sublayer(x)
        return self.head(self.residual.end(state, norm=self.norms[-1]))  # was: norms[-1](h)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Transformer(sys.argv[1] if len(sys.argv) > 1 else "attnres-block:block=2")
    optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=3e-3, weight_decay=0.1))
    for step in range(1, 101):
        tokens = torch.randint(16, (16, 8)).repeat(1, 2)
        logits = model(tokens[:, :-1]).transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss of the repeated half {losses[:, 8:].mean():.3f}")
