"""Sampling from a decoder, with or without a KV cache; both give the same tokens."""

import torch
from torch import Tensor

from .decoder import Decoder
from .sampling import check_sampling


def sample(
    logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token for each row of logits (B, vocab). Temperature 0 takes the largest."""
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        ahead = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass before each token: the first always stays
        dropped = torch.zeros_like(ahead, dtype=torch.bool).scatter(-1, order, ahead >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(-1).to(logits.device)


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    stop: int | None = None,
) -> Tensor:
    """Continue prompts.

    Arguments:
        model: a `Decoder`; it is put into evaluation mode meanwhile.
        tokens: prompts (B, T), all of one length.
        max_new_tokens: how many to draw at most; with the prompt they must fit the model's context.
        temperature: 0 takes the likeliest token each time.
        top_k, top_p: draw among the k likeliest, and among the likeliest that together reach this probability.
        seed: of the draw.
        use_cache: False reads everything again for each token; the tokens are the same.
        stop: a token that ends a row; it repeats it until every row has ended.

    Returns prompt and continuation, (B, T + new).
    Raises ValueError for settings out of range, naming them, and for prompts that do not fit.

        generate(model, torch.tensor([[1, 2, 3]]), 20, temperature=0.8, top_p=0.95)
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    _check(model, tokens, max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache() if use_cache else None
    training = model.training
    model.eval()
    unread, done = tokens, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        logits = model(unread, cache)[:, -1]
        new = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if stop is not None:
            new = new.masked_fill(done, stop)
            done |= new == stop
        tokens = torch.cat((tokens, new[:, None]), dim=1)
        unread = new[:, None] if use_cache else tokens
        if stop is not None and bool(done.all()):
            break
    model.train(training)
    return tokens


def _check(model: Decoder, tokens: Tensor, new: int) -> None:
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must be (batch, length) with at least one token, got {tuple(tokens.shape)}")
    context = model.config.context
    if tokens.shape[1] + new > context:
        raise ValueError(
            f"a prompt of {tokens.shape[1]} tokens and {new} new ones exceed the context of {context}: "
            f"lower max_new_tokens to {max(0, context - tokens.shape[1])}, or shorten the prompt"
        )
