"""Decoders so small that a forward and a backward pass take milliseconds."""

import torch

from headwater.models import Decoder, ModelConfig

LAYERS, DIM, VOCAB = 4, 32, 48


def model_of(spec, seed=0, scatter=False, **settings):
    """A small decoder; `scatter` moves every parameter off its start, so that nothing is at a symmetric point."""
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
                p.add_(
                    torch.randn(p.shape, generator=generator)
                    * (0.2 if p.dim() == 1 else 0.5 / p.shape[-1] ** 0.5)
                )
    return model


def tokens_of(batch=2, length=12, seed=2):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients_of(model, tokens):
    model.zero_grad()
    logits = model(tokens)
    torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}
