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
VALID = (
    f"Valid: {', '.join(MIXERS)}; with one of {', '.join(FEED_FORWARDS)} last, as in kda+moe; "
    "kda*3 for three"
)
Layer = tuple[str, ...]


def layers_of(pattern: str, layers: int, *, experts: int, dense: int) -> tuple[Layer, ...]:
    """Name the sublayers of each layer that a pattern describes.

    Arguments:
        pattern: layers separated by colons. Each names its mixers (attention, kda, mla, shortswa)
            and, if it likes, its feed-forward (mlp, moe), joined by `+`; `*3` behind a layer
            repeats it.
        layers: the number of layers; the pattern is one period of them, or all.
        experts: of a mixture. With any, feed-forwards that the pattern leaves out are mixtures.
        dense: the number of first layers whose feed-forward is an MLP all the same.

    Returns for each layer the kinds of its sublayers, in order.

    Raises ValueError for a pattern that names something else, or does not fit into `layers`.

        layers_of("kda*3:mla", 8, experts=0, dense=0)[3]      # ("mla", "mlp")
    """
    period = []
    for item in pattern.split(":"):
        period += _repeated(item, pattern)
    if layers % len(period):
        raise ValueError(
            f"the pattern '{pattern}' names {len(period)} layers, of which {layers} layers are no "
            f"multiple: name all {layers}, or choose another number of layers"
        )
    whole = period * (layers // len(period))
    if any("moe" in layer for layer in whole) and not experts:
        raise ValueError(f"the pattern '{pattern}' names moe: give experts, which is 0")
    complete = []
    for number, layer in enumerate(whole):
        if layer[-1] not in FEED_FORWARDS:
            mixture = experts and number >= dense
            layer = (*layer, "moe" if mixture else "mlp")
        complete.append(layer)
    return tuple(complete)


def _repeated(item: str, pattern: str) -> list[Layer]:
    """Return the layers that one item of a pattern stands for."""
    text, star, count = item.partition("*")
    layer = tuple(text.split("+"))
    if star and not (count.isdecimal() and int(count)):
        raise ValueError(
            f"'{item}' in the pattern '{pattern}' must end in a number of layers. {VALID}"
        )
    mixers = layer[:-1] if layer[-1] in FEED_FORWARDS else layer
    if not mixers or any(name not in MIXERS for name in mixers):
        raise ValueError(f"'{item}' in the pattern '{pattern}' names no layer. {VALID}")
    return [layer] * (int(count) if star else 1)


def write_pattern(mixers: list[str]) -> str:
    """Write the shortest pattern of mixers, one for each layer: their period, with runs counted.

    write_pattern(["kda", "kda", "mla"] * 2)      # "kda*2:mla"
    """
    # The period is the shortest beginning that, repeated, is the whole.
    length = len(mixers)
    size = 1
    while length % size or mixers != mixers[:size] * (length // size):
        size += 1
    items = []
    for name, run in groupby(mixers[:size]):
        count = len(list(run))
        items.append(name if count == 1 else f"{name}*{count}")
    return ":".join(items)
