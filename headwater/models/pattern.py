"""Layer patterns: which mixer, and which feed-forward, each layer has.

    kda:kda:kda:mla          one period, repeated until there are as many layers as asked for
    kda*3:mla                the same
    attention+mlp:kda+moe    the feed-forward of each layer by name
    shortswa+attention       two mixers in one layer

Nothing here imports torch.
"""

from itertools import groupby

MIXERS = ("attention", "kda", "mla", "shortswa")
FEED_FORWARDS = ("mlp", "moe")


def layers_of(
    pattern: str, layers: int, *, experts: int, dense: int
) -> tuple[tuple[str, ...], ...]:
    """The sublayers of each layer that a pattern describes.

    Arguments:
        pattern: layers separated by colons, each the names of its mixers (attention, kda, mla, shortswa) and, where it
            is said, of its feed-forward (mlp, moe), joined by `+`; `*3` behind one repeats it.
        layers: how many layers there are; the pattern is one period of them, or all.
        experts: in a mixture. Where there are some, feed-forwards that the pattern leaves out are mixtures,
        dense: but for those of so many first layers.

    Returns: for each layer the kinds of its sublayers, in order.

    Raises: ValueError for a pattern that names something else, or does not fit into `layers`.

        layers_of("kda*3:mla", 8, experts=0, dense=0)[3]      # ("mla", "mlp")
    """
    period = [layer for item in pattern.split(":") for layer in _repeated(item, pattern)]
    if layers % len(period):
        raise ValueError(
            f"the pattern '{pattern}' names {len(period)} layers, of which {layers} layers are no multiple: name all "
            f"{layers}, or choose another number of layers"
        )
    whole = period * (layers // len(period))
    if any("moe" in layer for layer in whole) and not experts:
        raise ValueError(f"the pattern '{pattern}' names moe: give experts, which is 0")
    found = []
    for number, layer in enumerate(whole):
        default = "moe" if experts and number >= dense else "mlp"
        found.append(layer if layer[-1] in FEED_FORWARDS else (*layer, default))
    return tuple(found)


def _repeated(item: str, pattern: str) -> list[tuple[str, ...]]:
    """The layers that one item of a pattern stands for."""
    text, star, count = item.partition("*")
    layer = tuple(text.split("+"))
    valid = f"Valid: {', '.join(MIXERS)}; with one of {', '.join(FEED_FORWARDS)} last, as in kda+moe; kda*3 for three"
    if star and not (count.isdecimal() and int(count)):
        raise ValueError(
            f"'{item}' in the pattern '{pattern}' must end in a number of layers. {valid}"
        )
    mixers = layer[:-1] if layer[-1] in FEED_FORWARDS else layer
    if not mixers or any(name not in MIXERS for name in mixers):
        raise ValueError(f"'{item}' in the pattern '{pattern}' names no layer. {valid}")
    return [layer] * (int(count) if star else 1)


def write_pattern(mixers: list[str]) -> str:
    """The shortest pattern of these mixers, one a layer: a period where there is one, runs counted.

    write_pattern(["kda", "kda", "mla"] * 2)      # "kda*2:mla"
    """
    length = len(mixers)
    size = next(
        n for n in range(1, length + 1) if length % n == 0 and mixers == mixers[:n] * (length // n)
    )
    runs = [(name, len(list(run))) for name, run in groupby(mixers[:size])]
    return ":".join(name if count == 1 else f"{name}*{count}" for name, count in runs)
