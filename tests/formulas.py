"""Every residual's formula written a second time, in the plainest way: the tests' oracle and the benchmark's rival.

    formula_of(residual)(x, run) -> what the head sees;   run(i, read) -> what sublayer i makes of its read

The residual lends its parameters; options come from its name, so that a class which ignores one is found out. Nothing
here saves memory, guards precision or keeps a state apart from the loop: that is what the classes are for. Layers are
attention, then MLP, with or without short attention before them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.residuals.base import Read, Residual
from headwater.residuals.registry import entry, parse

Run = Callable[[int, Read], Tensor]
# The residual, its options, the embedding, the sublayers
Formula = Callable[[Any, Any, Tensor, Run], Tensor]


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def weighted(weights: Any, sources: Any) -> Tensor:
    return sum(w * s for w, s in zip(weights, sources, strict=True))


def layers_of(residual: Any, o: Any) -> list[list[int]]:
    """The sublayers of each layer: short attention if there is one, attention, MLP."""
    size = 3 if "shortswa" in (o.kinds or ()) else 2
    return [list(range(first, first + size)) for first in range(0, residual.sublayers, size)]


def standard(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = x + run(i, x)
    return x


def gain(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = x + residual.gains[str(i)] * run(i, x)
    return x


def highway(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        gate = residual.gates[str(i)]
        g = F.linear(unit(x), gate.weight, gate.bias).sigmoid()
        x = (1 - g) * x + g * run(i, x)
    return x


def deepnorm(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = (
            unit((2 * len(layers_of(residual, o))) ** 0.25 * x + run(i, x), o.eps)
            * residual.norms[str(i)]
        )
    return x


def laurel(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    states = [x]
    for i in range(residual.sublayers):
        new, old = 1.0, 1.0
        if o.form in ("weighted", "weighted-low-rank"):
            new, old = 2 * residual.balance[str(i)].logits.softmax(0)
        x = new * run(i, states[-1]) + old * states[-1]
        if o.form != "weighted":
            low, noted = residual.low_rank[str(i)], states[-1]
            if o.form == "previous" and i > 0:
                noted = weighted(low.mix, states[-o.states :][::-1])
            x = x + F.linear(F.linear(noted, low.down), low.up)
        states.append(x)
    return states[-1]


def depth_window(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    window, width = o.window or min(4, residual.sublayers), o.width or residual.dim // 4
    states = []
    for i in range(residual.sublayers):
        states.append(unit(x))
        first = max(0, i - window + 1)
        reads = {
            j: residual.reads["0" if o.maps == "shared" else str(j)] for j in range(first, i + 1)
        }
        # Whose maps make key and value
        makers = {j: reads[i] if o.maps == "reader" else reads[j] for j in reads}
        v = torch.stack([F.linear(states[j], makers[j].value) for j in reads])
        if i > 0:
            k = torch.stack([F.linear(states[j], makers[j].key) for j in reads])
            scores = (F.linear(states[i], reads[i].query) * k).sum(-1, keepdim=True) / width**0.5
            v = scores.softmax(0) * v
        x = x + F.linear(v.sum(0), reads[i].output)
        x = x + run(i, x)
    return x


# Of streams, and of a depth read, in a residual that leaves no choice.
WITHOUT_CHOICE = {
    "final": "sum",
    "norm_eps": 1e-20,
    "query": "static",
    "weights": "softmax",
    "values": "raw",
    "key_norm": True,
    "heads": 1,
    "key_dim": None,
    "key_weight": True,
    "scale": "one",
    "start": None,
    "eps": 1e-6,
}


def depth_read(read: Any, o: Any, sources: list[Tensor]) -> Tensor:
    """One read of Attention Residuals: for each head its channels of query, keys and values."""
    raw = torch.stack(sources)
    values = unit(raw, o.eps) if o.values == "normed" else raw
    if o.weights == "static":
        return per_head(values, read.scalars.view(len(sources), *[1] * (values.dim() - 2), o.heads))
    keys = raw[..., -(o.key_dim or raw.shape[-1]) :]
    if o.key_norm:
        keys = unit(keys, o.eps) * (read.key_weight if o.key_weight else 1)
    width = keys.shape[-1]
    query = read.query * {"one": 1, "root": width**-0.5, "width": 1 / width}.get(o.scale, 1)
    if o.scale == "gain":
        query = read.gain * query / query.norm()
    if o.query == "projected":
        query = F.linear(unit(sources[-1], o.eps), query)
    logits = torch.stack([part.sum(-1) for part in (keys * query).chunk(o.heads, -1)], -1)
    return per_head(values, logits.softmax(0) if o.weights == "softmax" else logits.sigmoid())


def per_head(values: Tensor, weights: Tensor) -> Tensor:
    """sum_n weights_n values_n for values (N, ..., D), a head's weight for all channels of the head."""
    parts = zip(values.chunk(weights.shape[-1], -1), weights.unbind(-1), strict=True)
    return torch.cat([(part * weight.unsqueeze(-1)).sum(0) for part, weight in parts], -1)


def attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    block = o.block or max(2, ceil(residual.sublayers / 8))
    outputs: list[Tensor] = []
    for i in range(residual.sublayers + 1):
        blocks = [torch.stack(outputs[j : j + block]).sum(0) for j in range(0, i, block)]
        h = x if i == 0 else depth_read(residual.reads[str(i)], o, [x, *blocks[-(o.window or i) :]])
        if i < residual.sublayers:
            outputs.append(run(i, h))
    return h


def routed_attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    block, kinds = o.block or max(2, ceil(residual.sublayers / 8)), o.kinds or ("attention", "mlp")
    outputs: list[Tensor] = []
    for i in range(residual.sublayers):
        blocks = [torch.stack(outputs[j : j + block]).sum(0) for j in range(0, i, block)]
        values = unit(torch.stack([x, *blocks]), o.eps)
        h: Read = x
        if i > 0 and kinds[i % len(kinds)] == "attention":
            h = tuple(attended(query, values) for query in residual.reads[str(i)].query)
        elif i > 0:
            h = attended(residual.reads[str(i)].query, values)
        outputs.append(run(i, h))
    blocks = [torch.stack(outputs[j : j + block]).sum(0) for j in range(0, len(outputs), block)]
    last = residual.reads[str(residual.sublayers)].query
    return attended(last, unit(torch.stack([x, *blocks]), o.eps))


def attended(query: Tensor, values: Tensor) -> Tensor:
    """Attention of one query over values (N, ..., D), which are the keys too."""
    scores = values @ query / query.shape[-1] ** 0.5
    return (scores.softmax(0).unsqueeze(-1) * values).sum(0)


def delta_attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    stream = x
    outputs: list[Tensor] = []
    for i in range(residual.sublayers):
        blocks = [torch.stack(outputs[j : j + o.block]).sum(0) for j in range(0, i, o.block)]
        mixed = x if i == 0 else depth_read(residual.reads[str(i)], o, [x, *blocks])
        outputs.append(run(i, stream + mixed))
        stream = stream + outputs[-1]
    return stream


def denseformer(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for m, layer in enumerate(layers_of(residual, o), 1):
        for i in layer:
            x = x + run(i, x)
        outputs.append(x)
        if m % o.period == 0:
            # The last, of one term, has none
            weights = residual.sums.get(str(layer[-1] + 1), [1.0])
            x = weighted(weights, outputs[m % o.dilation :: o.dilation])
    return x


def every_layer_counts(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for *short, i, j in layers_of(residual, o):
        if outputs[1:]:
            x = weighted(residual.logits[str((*short, i)[0])].softmax(0), outputs)
        for s in short:
            x = x + run(s, x)
        t = run(i, x)
        u = t + run(j, t if o.variant == "base" else x + t)
        outputs.append(unit(u) if o.variant == "normalized" else u)
    if o.variant != "weighted-output":
        return outputs[-1]
    return weighted(residual.logits[str(residual.sublayers)].softmax(0), outputs)


def vertical_attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for layer in layers_of(residual, o):
        if outputs[1:]:
            x = weighted(residual.logits[str(layer[0])].softmax(0), [unit(u) for u in outputs])
        for i in layer:
            x = x + run(i, x)
        outputs.append(x)
    return x


def deep_cross_attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def reads(i: int) -> list[Tensor]:
        """One for each input, over all outputs or (k-DCA) the embedding, the sum of older ones and the last k."""
        k, grn = o.last, residual.grns[str(i)]
        bank = (
            outputs
            if k is None or len(outputs) <= k + 2
            else [x, torch.stack(outputs[1:-k]).sum(0), *outputs[-k:]]
        )
        inputs = []
        for way, constants in enumerate(grn.constant):
            extra = [
                (u * grn.query[way]).sum(-1, keepdim=True).relu() if o.version == "v3" else 0.0
                for u in bank
            ]
            inputs.append(weighted([b + e for b, e in zip(constants, extra, strict=True)], bank))
        return inputs

    outputs = [x]
    for *short, i, j in layers_of(residual, o):
        inputs = reads((*short, i)[0]) if outputs[1:] else [x]
        for s in short:
            y = run(s, inputs[0])
            inputs = [u + y for u in inputs]
        t = run(
            i,
            (inputs[0], inputs[1], inputs[2])
            if outputs[1:] and o.inputs == "separate"
            else inputs[0],
        )
        outputs.append(t + run(j, inputs[0] + t))
    return reads(residual.sublayers)[0]


def muddformer(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def reads(i: int) -> list[Tensor]:
        dense = residual.dense[str(i)]
        hidden = F.linear(F.gelu(F.linear(unit(outputs[-1]), dense.down)), dense.up)
        weights = hidden.unflatten(-1, dense.constant.shape) + dense.constant
        if not o.norm:
            return [weighted(way.unsqueeze(-1).unbind(-2), outputs) for way in weights.unbind(-2)]
        firsts = [*(layer[0] for layer in layers_of(residual, o)), residual.sublayers]
        normed = [unit(u) * residual.before[str(first)] for u, first in zip(outputs, firsts)]
        *sums, stream = [
            weighted(way.unsqueeze(-1).unbind(-2), normed) for way in weights.unbind(-2)
        ]
        return [outputs[-1] + u for u in (*sums, unit(stream) * residual.after[str(i)])]

    outputs = [x]
    for *short, i, j in layers_of(residual, o):
        inputs = reads((*short, i)[0]) if outputs[1:] else [x]
        for s in short:
            y = run(s, inputs[-1])
            inputs = [u + y for u in inputs]
        t = inputs[-1] + run(i, (inputs[0], inputs[1], inputs[2]) if outputs[1:] else inputs[0])
        outputs.append(t + run(j, t))
    return reads(residual.sublayers)[0]


def streams(
    residual: Any, o: Any, x: Tensor, run: Run, coefficients: Callable[..., tuple[Tensor, ...]]
) -> Tensor:
    h = torch.stack([x] * o.streams, dim=-2)  # (..., n, D)
    for i in range(residual.sublayers):
        pre, post, res = coefficients(h, i)
        y = run(i, torch.einsum("...n,...nd->...d", pre, h))
        h = torch.einsum("...ij,...jd->...id", res, h) + torch.einsum("...n,...d->...nd", post, y)
    # A learned final read has a mapping of its own.
    if str(residual.sublayers) in getattr(residual, "mappings", ()):
        (last,) = mapped(residual, o, h, residual.sublayers)
        return torch.einsum("...n,...nd->...d", last.sigmoid() + o.eps, h)
    return h.mean(-2) if o.final == "mean" else h.sum(-2)


def connection(c: Any, form: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's matrices: h = A_m^T H, H' = A_r^T H + B^T y, each plus its dynamic part."""
    if form == "static":
        shape = h.shape[:-2]
        return c.pre.expand(*shape, -1), c.post.expand(*shape, -1), c.res.T.expand(*shape, -1, -1)
    t = torch.tanh(F.linear(unit(h), c.dynamic))  # (..., n, n + 2)
    beta, alpha = c.post + c.post_scale * t[..., 0], c.pre + c.mix_scale * t[..., 1]
    return alpha, beta, (c.res + c.mix_scale * t[..., 2:]).mT


def hyper_connections(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    return streams(
        residual, o, x, run, lambda h, i: connection(residual.connections[str(i)], o.form, h)
    )


def hyper_attention(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    """The two loops side by side: the attention's sublayers hand their read to the streams' and share its output."""
    block = o.block or max(2, ceil(residual.sublayers / 8))
    outputs: list[Tensor] = []

    def depth(i: int) -> Tensor:
        blocks = [torch.stack(outputs[j : j + block]).sum(0) for j in range(0, i, block)]
        return x if i == 0 else depth_read(residual.depth_part.reads[str(i)], o, [x, *blocks])

    def both(i: int, read: Any) -> Tensor:
        outputs.append(run(i, read + depth(i)))
        return outputs[-1]

    connections = residual.stream_part.connections
    mixed = streams(residual, o, x, both, lambda h, i: connection(connections[str(i)], o.form, h))
    return mixed + depth(residual.sublayers)


def mapped(residual: Any, o: Any, h: Tensor, i: int) -> list[Tensor]:
    """The logits of pre, post and res of sublayer i, as far as it has them."""
    mapping = residual.mappings[str(i)]
    raw = F.linear(unit(h.flatten(-2), eps=o.norm_eps), mapping.weight)
    n, parts = o.streams, len(mapping.scale)
    sizes = [n, n, raw.shape[-1] - 2 * n][:parts]
    pieces = zip(mapping.scale, raw.split(sizes, -1), mapping.bias.split(sizes), strict=True)
    return [scale * piece + bias for scale, piece, bias in pieces]


def mhc(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def coefficients(h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = mapped(residual, o, h, i)
        matrix = logits.unflatten(-1, (o.streams, o.streams)).exp()
        matrix = matrix / matrix.sum(-2, keepdim=True) + o.eps
        matrix = matrix / (matrix.sum(-1, keepdim=True) + o.eps)
        for _ in range(o.iterations - 1):
            matrix = matrix / (matrix.sum(-2, keepdim=True) + o.eps)
            matrix = matrix / (matrix.sum(-1, keepdim=True) + o.eps)
        return pre.sigmoid() + o.eps, 2 * post.sigmoid(), matrix

    return streams(residual, o, x, run, coefficients)


def identity_hyper(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def coefficients(h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post = mapped(residual, o, h, i)
        one = torch.eye(o.streams, dtype=x.dtype).expand(*post.shape, o.streams)
        return pre.sigmoid() + o.eps, o.magnitude * post.sigmoid() + o.eps, one

    return streams(residual, o, x, run, coefficients)


def gated_hyper(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def read(i: int) -> tuple[Tensor, Tensor]:
        """The read, and the normed streams that it is made of."""
        gates = residual.gates[str(i)]
        normed = (unit(h, o.eps) * (1 + gates.norm)).flatten(-2)
        hidden = F.silu(F.linear(normed, gates.down) / o.streams)
        gated = F.linear(hidden, gates.up).sigmoid() * normed
        return gated.unflatten(-1, h.shape[-2:]).mean(-2), normed

    h = torch.stack([x] * o.streams, dim=-2)  # (..., n, D)
    for i in range(residual.sublayers):
        u, normed = read(i)
        inject = F.linear(normed, residual.gates[str(i)].inject)
        post = 2 * (inject / o.streams).sigmoid()
        h = h + post.unsqueeze(-1) * run(i, u).unsqueeze(-2)
    return read(residual.sublayers)[0]


def mhc_lite(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def coefficients(h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = mapped(residual, o, h, i)
        weights = logits.softmax(-1)
        mixed = torch.einsum("...r,rij->...ij", weights, matrices)
        return pre.sigmoid(), 2 * post.sigmoid(), mixed

    one = torch.eye(o.streams, dtype=x.dtype, device=x.device)
    matrices = torch.stack([one[list(order)] for order in permutations(range(o.streams))])
    return streams(residual, o, x, run, coefficients)


def deep_delta(residual: Any, o: Any, x: Tensor, run: Run) -> Tensor:
    def compressed(i: int) -> Tensor:
        if o.width == 1:
            return stream[..., 0]
        c = residual.compressors[str(next((layer[0] for layer in layers if i in layer), i))]
        columns = range(o.width)
        if o.compress == "channel":  # one column before and the rest after
            padded = F.pad(stream, (1, o.width))
            convolved = [weighted(c.kernel, [padded[..., o + j] for j in columns]) for o in columns]
        else:  # over the last four tokens
            padded = F.pad(stream, (0, 0, 0, 0, 3, 0))
            length = stream.shape[-3]
            taps = [padded[..., j : j + length, :, :] for j in range(4)]
            convolved = [weighted(c.kernel[:, o], [tap[..., o] for tap in taps]) for o in columns]
        return weighted(c.read, convolved)

    layers = layers_of(residual, o)
    stream = torch.stack([x] * o.width, dim=-1)  # (..., D, n)
    if o.expand == "token":
        taps = [F.pad(x, (0, 0, 3 - j, 0))[..., : x.shape[-2], :] for j in range(4)]
        stream = torch.stack(
            [weighted(taps_of, taps) for taps_of in residual.expander.kernel.unbind(1)], dim=-1
        )
    for i in range(residual.sublayers):
        h, w = compressed(i), residual.writes[str(i)]
        y = run(i, h)
        k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
        beta = 2 * F.linear(unit(h), w.beta_weight, w.beta_bias).sigmoid().unsqueeze(-1)
        value = unit(h) @ w.value_weight.T
        if o.value == "bounded":
            value = 4 * F.linear(h, w.value_weight, w.value_bias).sigmoid()
        error = value - torch.einsum("...d,...dn->...n", k, stream)
        stream = stream + beta * torch.einsum("...d,...n->...dn", k, error)
    return compressed(residual.sublayers)


FORMULAS: Mapping[str, Formula] = {
    "standard": standard,
    "rezero": gain,
    "layerscale": gain,
    "highway": highway,
    "deepnorm": deepnorm,
    "laurel": laurel,
    "depth-window": depth_window,
    "attnres-block": attention,
    "attnres-full": attention,
    "attnres-routed": routed_attention,
    "delta-attnres": delta_attention,
    "denseformer": denseformer,
    "elc-bert": every_layer_counts,
    "vertical-attention": vertical_attention,
    "deepcrossattention": deep_cross_attention,
    "muddformer": muddformer,
    "hyper-connections": hyper_connections,
    "hyper-attnres": hyper_attention,
    "identity-hc": identity_hyper,
    "gated-hc": gated_hyper,
    "mhc": mhc,
    "mhc-lite": mhc_lite,
    "ddl": deep_delta,
}


def formula_of(
    residual: Residual, kinds: Sequence[str] | None = None
) -> Callable[[Tensor, Run], Tensor]:
    """The formula of this residual: of the embedding, and of what runs a sublayer. `kinds`: as `build` was given."""
    return partial(FORMULAS[residual.spec.partition(":")[0]], residual, asked_of(residual, kinds))


def asked_of(residual: Residual, kinds: Sequence[str] | None) -> SimpleNamespace:
    """What the residual's name asks for, and defaults."""
    name, arguments = parse(residual.spec)
    names_by_id = entry(name)
    keywords = inspect.signature(names_by_id.build).parameters.values()
    defaults = {p.name: p.default for p in keywords if p.kind is p.KEYWORD_ONLY}
    return SimpleNamespace(
        **{**WITHOUT_CHOICE, **defaults, **names_by_id.fixed, **arguments, "kinds": kinds}
    )
