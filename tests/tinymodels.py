"""Decoders, and residuals, so small that a forward and a backward pass take milliseconds."""

import torch

from headwater.models import Decoder, ModelConfig
from headwater.residuals import build

LAYERS, DIM, VOCAB = 4, 32, 48


def model_of(spec, seed=0, scatter=False, **settings):
    """A small decoder; `scatter` moves every parameter off its start, to no symmetric point."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "dim": DIM,
        "layers": LAYERS,
        "heads": 4,
        "kv_heads": 2,
        "mlp_dim": 48,
        "context": 32,
    }
    model = Decoder(ModelConfig(**{**shape, "residual": spec, **settings}))
    if scatter:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for p in model.parameters():
                scale = 0.2 if p.dim() == 1 else 0.5 / p.shape[-1] ** 0.5
                p.add_(torch.randn(p.shape, generator=generator) * scale)
    return model


def scattered(spec, dim=16, sublayers=8, scale=0.5, dtype=torch.float32, kinds=None):
    """A residual whose parameters are moved off their start; and what torch draws next follows."""
    torch.manual_seed(0)
    residual = build(spec, dim, sublayers, kinds).to(dtype)
    with torch.no_grad():
        for p in residual.parameters():
            p.add_(scale * torch.randn(p.shape, dtype=dtype))
    return residual


def inputs_of(read):
    """What a read gives, as a tuple: one input, or three for query, key and value."""
    return read if isinstance(read, tuple) else (read,)


def advance(residual, state, sublayer, start=0, stop=None, norms=None):
    """The state behind sublayers `start` to `stop`; sublayer(i, x) makes the i-th output."""
    for i in range(start, residual.sublayers if stop is None else stop):
        read, state = residual.read(state, i, norm=norms and norms[i])
        state = residual.write(state, i, sublayer(i, inputs_of(read)[0]))
    return state


def tokens_of(batch=2, length=12, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def in_pieces(model, tokens, *sizes):
    """Logits of tokens that a cache is given in pieces of these sizes."""
    cache = model.new_cache(len(tokens))
    return torch.cat([model(piece, cache) for piece in tokens.split(sizes, 1)], 1)


def without_gradient(gradients):
    """Names of parameters that no gradient reaches."""
    return [name for name, g in gradients.items() if g is None or g.abs().max() == 0]


def gradients_of(model, tokens):
    model.zero_grad()
    logits = model(tokens)
    predictions, following = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    torch.nn.functional.cross_entropy(predictions, following).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}
