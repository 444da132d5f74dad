"""One forward pass of a model, taken apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.evaluation import evaluating
from headwater.residuals import Norm, Residual, Trace, build, mixing, pinned

from .inspection import Inspection, Top
from .removal import losses, remove, top_of
from .shares import STREAMS, Shares
from .subject import Subject

Removals = Literal["auto", "none", "sources", "pairs"]
# Operations that are spent on pairs without being asked: about a minute. 24 layers of width 64 and 128 tokens, 4e11,
# took seven on a busy core.
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
    """Look inside one forward pass: who reads whom, what each part says, and what happens without it.

    Arguments:
        model: a `Decoder`, or a transformers model that `headwater.convert` has converted. It is left as it was.
        tokens: (T) or (1, T), two at least and within the model's context.
        tokenizer: anything with `decode(ids)`; without one, tokens are shown by their numbers.
        name: what the page calls the model; by default its residual.
        top: how many of the likeliest tokens are kept of each read and source.
        removals: what is taken away to see its effect: "none"; "sources", each source at all reads (S forward passes);
            "pairs", also at each read alone (about S^2 / 2 more); "auto": pairs where they take about a minute.

    Returns an `Inspection`: tensors by read, source and token, `.to_html()`, `.to_json()`; a notebook draws it.
    Raises UserError for a model without a residual of headwater, and for tokens that do not fit it.

        run = load_run("runs/first")
        tokens = run.tokenizer.encode("def add(").tolist()
        headwater.inspect(run.model, tokens, tokenizer=run.tokenizer).save("inspect.html")
    """
    subject = Subject(model)
    rows = _checked(tokens, model)
    with evaluating(model):
        trace, norm, logits, experts = subject.trace(rows)
        shares = Shares(subject.residual, trace.sources, trace.reads)
        loss = losses(logits, rows)[0]
        says = [_lens(subject, norm, parts, top) for parts in (trace.reads, trace.sources)]
        chosen = _affordable(subject, rows.shape[1]) if removals == "auto" else removals
        places = _places(len(trace.sources), chosen)
        effects = [
            remove(subject, rows, shares, p, loss, top, logits.shape[-1]) if p else None
            for p in places
        ]
    ids = tuple(rows[0].tolist())
    texts = _texts(
        tokenizer, ids, [*says, *(effect.top for effect in effects if effect is not None)]
    )
    return Inspection(
        name=name or subject.residual.spec,
        residual=subject.residual.spec,
        mixes=subject.residual.mixes,
        kinds=tuple(
            "moe" if i in experts and kind == "mlp" else kind
            for i, kind in enumerate(subject.kinds)
        ),
        tokens=tuple(texts[i] for i in ids),
        ids=ids,
        texts=texts,
        loss=loss,
        mixing=shares.weights(0).cpu(),
        parts=_parts(subject.residual, trace, shares),
        read_size=_sizes(trace.reads),
        source_size=_sizes(trace.sources),
        reads=says[0],
        sources=says[1],
        experts=experts,
        removed=effects[0],
        removed_at=effects[1],
        notes=_notes(subject),
    )


def _checked(tokens: Tensor | Sequence[int], model: nn.Module) -> Tensor:
    if isinstance(tokens, str):
        raise UserError(
            "tokens are numbers, and this is a text: give tokenizer.encode(text), with the tokenizer beside it"
        )
    if isinstance(tokens, Mapping):
        raise UserError(
            f"tokens are numbers, and this has them under a name: give ...['input_ids'], of {[*tokens]}"
        )
    rows = torch.as_tensor(tokens, dtype=torch.long, device=next(model.parameters()).device)
    rows = rows[None] if rows.dim() == 1 else rows
    if rows.dim() != 2 or rows.shape[0] != 1:
        raise UserError(f"tokens must be one prompt, (T) or (1, T); got {tuple(rows.shape)}")
    if rows.shape[1] < 2:
        raise UserError(
            f"the prompt must have two tokens at least, since the page shows how well each foretells the next; "
            f"got {rows.shape[1]}"
        )
    config: Any = model.config
    context = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    if context is not None and rows.shape[1] > context:
        raise UserError(
            f"{rows.shape[1]} tokens exceed the model's context of {context}: give a shorter prompt"
        )
    if int(rows.min()) < 0 or int(rows.max()) >= config.vocab_size:
        raise UserError(
            f"tokens must lie between 0 and {config.vocab_size - 1}, got {int(rows.min())} to {int(rows.max())}"
        )
    return rows


@torch.no_grad()
def _lens(subject: Subject, norm: Norm, parts: Sequence[Any], count: int) -> Top:
    """What each part says through the final norm and the head; of three inputs the first, which queries read."""
    first = [part[0] if isinstance(part, tuple) else part for part in parts]
    tops = [top_of(subject.head(norm(x))[0].float(), count) for x in first]
    return Top(
        torch.stack([top.ids for top in tops]), torch.stack([top.probabilities for top in tops])
    )


def _sizes(parts: Sequence[Any]) -> Tensor:
    first = [part[0] if isinstance(part, tuple) else part for part in parts]
    return torch.stack([x[0].float().square().mean(-1).sqrt().cpu() for x in first])


def _parts(residual: Residual, trace: Trace, shares: Shares) -> dict[str, Tensor]:
    """Mixing of each input, or of each head, where there are several."""
    if shares.inputs > 1:
        return {name: shares.weights(stream).cpu() for stream, name in enumerate(STREAMS)}
    heads = max(weights.shape[-1] for weights in trace.weights)
    if heads == 1:
        return {}
    by_head = mixing(residual, trace.sources, groups=heads)[:, :, 0].cpu()
    return {f"head {head + 1}": by_head[..., head] for head in range(heads)}


def _affordable(subject: Subject, length: int) -> Removals:
    parameters = sum(p.numel() for p in subject.model.parameters())
    device = next(subject.model.parameters()).device.type
    cost = 2 * parameters * length * len(subject.kinds) ** 2 / 2
    return "pairs" if cost < CHEAP.get(device, CHEAP["cpu"]) else "sources"


def _places(
    sources: int, removals: Removals
) -> tuple[list[tuple[int | None, int]], list[tuple[int | None, int]]]:
    everywhere: list[tuple[int | None, int]] = [(None, source) for source in range(sources)]
    pairs: list[tuple[int | None, int]] = [
        (read, source) for read in range(sources) for source in range(read + 1)
    ]
    return everywhere if removals in (
        "sources",
        "pairs",
    ) else [], pairs if removals == "pairs" else []


def _texts(tokenizer: Decodes | None, ids: Sequence[int], tops: Sequence[Top]) -> dict[int, str]:
    used = sorted(set(ids).union(*(top.ids.unique().tolist() for top in tops)))
    return {token: _text(tokenizer, token) for token in used}


def _text(tokenizer: Decodes | None, token: int) -> str:
    """A token that is no text by itself, such as part of a letter, is shown by its number."""
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
    """Whether every parameter that does not start at random still has its start value; False without any such."""
    with torch.random.fork_rng(devices=[]):
        fresh = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            made = build(pinned(residual), residual.dim, residual.sublayers, residual.kinds or None)
            fresh.append(dict(made.named_parameters()))
    fixed = [name for name, start in fresh[0].items() if torch.equal(start, fresh[1][name])]
    now = dict(residual.named_parameters())
    return bool(fixed) and all(
        torch.equal(now[name].detach().cpu(), fresh[0][name].detach().to(now[name].dtype))
        for name in fixed
    )
