"""One forward pass of a model, taken apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.evaluation import evaluating
from headwater.residuals import Norm, Residual, Trace, build, mixing, pinned

from .forward_pass import Top
from .inspection import Inspection
from .removal import Place, losses, remove, top_of
from .shares import STREAMS, Shares
from .subject import Subject

Removals = Literal["auto", "none", "sources", "pairs"]
# Operations that are spent on pairs without being asked: about a minute. 24 layers of width 64 and
# 128 tokens, 4e11, took seven minutes on a busy core.
CHEAP = {"cpu": 1e11, "cuda": 2e13}


class Decodes(Protocol):
    """Any tokenizer: of a run, or of transformers."""

    def decode(self, ids: Iterable[int]) -> str: ...


def inspect(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    *,
    tokenizer: Decodes | Any | None = None,
    name: str | None = None,
    top: int = 5,
    removals: Removals = "auto",
) -> Inspection:
    """Look inside one forward pass: who reads whom, what each part says, and its effect.

    Arguments:
        model: a `Decoder`, or a transformers model that `headwater.convert` has converted. It is
        left as it was.
        tokens: (T) or (1, T), two at least and within the model's context.
        tokenizer: anything with `decode(ids)`; without one, tokens are shown by their numbers.
        name: what the page calls the model; by default its residual.
        top: how many of the likeliest tokens are kept of each read and source.
        removals: what is taken away to see its effect: "none"; "sources", each source at all reads
            (S forward passes); "pairs", also at each read alone (about S^2 / 2 more); "auto": pairs
            where they take about a minute.

    Returns an `Inspection`: tensors by read, source and token, `.to_html()`, `.to_json()`; a
    notebook draws it.
    Raises UserError for a model without a residual of headwater, and for tokens that do not fit it.

        run = load_run("runs/first")
        tokens = run.tokenizer.encode("def add(").tolist()
        headwater.inspect(run.model, tokens, tokenizer=run.tokenizer).save("inspect.html")
    """
    subject = Subject(model)
    rows = _checked(tokens, subject)
    with evaluating(model):
        # One pass with everything in it.
        trace, norm, logits, experts = subject.trace(rows)
        shares = Shares(subject.residual, trace.sources, trace.reads)
        loss = losses(logits, rows)[0]
        reads = _lens(subject, norm, trace.reads, top)
        sources = _lens(subject, norm, trace.sources, top)

        # Taking away is what takes time: S forward passes, and one for each pair.
        if removals == "auto":
            removals = _affordable(subject, rows.shape[1])
        everywhere: list[Place] = []
        pairs: list[Place] = []
        for place in range(len(trace.sources)):  # as many reads as sources
            everywhere.append((None, place))
            pairs += [(place, source) for source in range(place + 1)]
        removed = removed_at = None
        if removals in ("sources", "pairs"):
            removed = remove(subject, rows, shares, everywhere, loss, top, logits.shape[-1])
        if removals == "pairs":
            removed_at = remove(subject, rows, shares, pairs, loss, top, logits.shape[-1])

    # The text of every token that stands anywhere.
    ids = tuple(rows[0].tolist())
    tops = [reads, sources, *(effect.top for effect in (removed, removed_at) if effect)]
    texts = _texts(tokenizer, ids, tops)
    return Inspection(
        name=name or subject.residual.spec,
        residual=subject.residual.spec,
        mixes=subject.residual.mixes,
        kinds=_kinds(subject, experts),
        tokens=tuple(texts[i] for i in ids),
        ids=ids,
        texts=texts,
        loss=loss,
        mixing=shares.weights(0).cpu(),
        parts=_parts(subject.residual, trace, shares),
        read_size=_sizes(trace.reads),
        source_size=_sizes(trace.sources),
        reads=reads,
        sources=sources,
        experts=experts,
        removed=removed,
        removed_at=removed_at,
        notes=_notes(subject),
    )


def _kinds(subject: Subject, experts: Mapping[int, Top]) -> tuple[str, ...]:
    """The kinds of sublayers; an MLP that has experts is a mixture of them."""
    kinds = list(subject.kinds)
    for sublayer in experts:
        if kinds[sublayer] == "mlp":
            kinds[sublayer] = "moe"
    return tuple(kinds)


def _checked(tokens: Tensor | Sequence[int], subject: Subject) -> Tensor:
    if isinstance(tokens, str):
        raise UserError(
            "tokens are numbers, and this is a text: give tokenizer.encode(text), with the tokenizer beside it"
        )
    if isinstance(tokens, Mapping):
        raise UserError(
            f"tokens are numbers, and this has them under a name: give ...['input_ids'], of {[*tokens]}"
        )
    device = next(subject.model.parameters()).device
    rows = torch.as_tensor(tokens, dtype=torch.long, device=device)
    rows = rows[None] if rows.dim() == 1 else rows
    if rows.dim() != 2 or rows.shape[0] != 1:
        raise UserError(f"tokens must be one prompt, (T) or (1, T); got {tuple(rows.shape)}")
    if rows.shape[1] < 2:
        raise UserError(
            f"the prompt must have two tokens at least, since the page shows how well each foretells the next; "
            f"got {rows.shape[1]}"
        )
    config: Any = subject.model.config
    # The text part of a vision-language model says it.
    if subject.converted:
        config = config.get_text_config()
    # transformers has another name for the context.
    context = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    if context is not None and rows.shape[1] > context:
        raise UserError(
            f"{rows.shape[1]} tokens exceed the model's context of {context}: give a shorter prompt"
        )
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= config.vocab_size:
        raise UserError(
            f"tokens must lie between 0 and {config.vocab_size - 1}, got {low} to {high}"
        )
    return rows


@torch.no_grad()
def _lens(subject: Subject, norm: Norm, parts: Sequence[Any], count: int) -> Top:
    """Read each part through the final norm and the head: the tokens that it makes likely."""
    ids, probabilities = [], []
    for x in _first_inputs(parts):
        logits = subject.head(norm(x))[0]
        top = top_of(logits.float(), count)
        ids.append(top.ids)
        probabilities.append(top.probabilities)
    return Top(torch.stack(ids), torch.stack(probabilities))


def _sizes(parts: Sequence[Any]) -> Tensor:
    """Root mean squares over channels, (parts, T)."""
    stack = torch.stack([x[0].float() for x in _first_inputs(parts)])
    return stack.square().mean(-1).sqrt().cpu()


def _first_inputs(parts: Sequence[Any]) -> list[Tensor]:
    """The input of each read; of query, key and value the query's."""
    return [part[0] if isinstance(part, tuple) else part for part in parts]


def _parts(residual: Residual, trace: Trace, shares: Shares) -> dict[str, Tensor]:
    """The mixing of each input, or of each head, where there are several."""
    # Query, key and value, or the heads of a read; one input of one head is shown as it is.
    if shares.inputs > 1:
        return {name: shares.weights(stream).cpu() for stream, name in enumerate(STREAMS)}
    heads = max(weights.shape[-1] for weights in trace.weights)
    if heads == 1:
        return {}
    matrix = mixing(residual, trace.sources, groups=heads)[:, :, 0]
    by_head = matrix.cpu().unbind(-1)
    return {f"head {number}": weights for number, weights in enumerate(by_head, 1)}


def _affordable(subject: Subject, length: int) -> Removals:
    parameters = sum(p.numel() for p in subject.model.parameters())
    device = next(subject.model.parameters()).device.type
    # A pass takes two operations per parameter and token; there are S^2 / 2 pairs.
    passes = len(subject.kinds) ** 2 / 2
    cost = 2 * parameters * length * passes
    return "pairs" if cost < CHEAP.get(device, CHEAP["cpu"]) else "sources"


def _texts(tokenizer: Decodes | None, ids: Sequence[int], tops: Sequence[Top]) -> dict[int, str]:
    used = set(ids)
    for top in tops:
        used.update(top.ids.unique().tolist())
    return {token: _text(tokenizer, token) for token in sorted(used)}


def _text(tokenizer: Decodes | None, token: int) -> str:
    """The text of a token, or its number where it is no text by itself, as a part of a letter."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return f"#{token}" if not text or "\ufffd" in text else text


def _notes(subject: Subject) -> tuple[str, ...]:
    if not at_start(subject.residual):
        return ()
    if subject.converted:
        return (
            "Converted and not trained: its depth weights are those it started with, so they mean nothing yet. What it "
            "computes is the model before conversion.",
        )
    return ("Not trained: its depth weights are those it started with, so they mean nothing yet.",)


def at_start(residual: Residual) -> bool:
    """Tell whether no parameter has moved from its start; False where all start at random.

    Two fresh copies, of other seeds, show which parameters start at a fixed value.
    """
    copies = []
    with torch.random.fork_rng(devices=[]):
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            copy = build(pinned(residual), residual.dim, residual.sublayers, residual.kinds or None)
            copies.append(dict(copy.named_parameters()))
    first, second = copies
    any_fixed = False
    for name, parameter in residual.named_parameters():
        start = first[name].detach()
        if torch.equal(start, second[name]):
            any_fixed = True
            if not torch.equal(parameter.detach().cpu(), start.to(parameter.dtype)):
                return False
    return any_fixed
