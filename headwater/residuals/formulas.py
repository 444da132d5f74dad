"""Every residual's formula written a second time, in the plainest way: the tests' oracle and the benchmark's rival.

    formula(residual, x, run) -> what the head sees;   run(i, read) -> what sublayer i makes of its read

The residual lends its parameters and options. Nothing here saves memory, guards precision or keeps a state apart from
the loop: that is what the classes are for. Layers are attention, then MLP.
"""

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Read, Residual

Run = Callable[[int, Read], Tensor]
Formula = Callable[[Any, Tensor, Run], Tensor]


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def weighted(weights: Any, sources: Any) -> Tensor:
    return sum(w * s for w, s in zip(weights, sources, strict=True))


def standard(residual: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = x + run(i, x)
    return x


def gain(residual: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = x + residual.gains[str(i)] * run(i, x)
    return x


def highway(residual: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        gate = residual.gates[str(i)]
        g = F.linear(unit(x), gate.weight, gate.bias).sigmoid()
        x = (1 - g) * x + g * run(i, x)
    return x


def deepnorm(residual: Any, x: Tensor, run: Run) -> Tensor:
    for i in range(residual.sublayers):
        x = unit(residual.sublayers**0.25 * x + run(i, x)) * residual.norms[str(i)]  # 2 M sublayers for M layers
    return x


def laurel(residual: Any, x: Tensor, run: Run) -> Tensor:
    states = [x]
    for i in range(residual.sublayers):
        new, old = 1.0, 1.0
        if residual.balance:
            new, old = 2 * residual.balance[str(i)].logits.softmax(0)
        x = new * run(i, states[-1]) + old * states[-1]
        if residual.low_rank:
            low = residual.low_rank[str(i)]
            seen = states[-residual.states :][::-1]
            x = x + F.linear(F.linear(seen[0] if low.mix is None else weighted(low.mix, seen), low.down), low.up)
        states.append(x)
    return states[-1]


def depth_window(residual: Any, x: Tensor, run: Run) -> Tensor:
    keys, values = [], []
    for i in range(residual.sublayers):
        read, n = residual.reads[str(i)], unit(x)
        keys.append(F.linear(n, read.key))
        values.append(F.linear(n, read.value))
        k, v = torch.stack(keys[-residual.window :]), torch.stack(values[-residual.window :])
        query = torch.zeros_like(k[0]) if read.query is None else F.linear(n, read.query)
        scores = (query * k).sum(-1, keepdim=True) / residual.width**0.5
        x = x + F.linear((scores.softmax(0) * v).sum(0), read.output)
        x = x + run(i, x)
    return x


def depth_read(read: Any, sources: list[Tensor], eps: float) -> Tensor:
    stack = torch.stack(sources)
    logits = (unit(stack, eps) * read.key_weight * read.query).sum(-1, keepdim=True)
    return (logits.softmax(0) * stack).sum(0)


def attention(residual: Any, x: Tensor, run: Run) -> Tensor:
    """Static queries, softmax, one head, no window."""
    sources = [x]
    for i in range(residual.sublayers + 1):
        h = x if i == 0 else depth_read(residual.reads[str(i)], sources, residual.eps)
        if i == residual.sublayers:
            break
        y = run(i, h)
        sources = [*sources[:-1], sources[-1] + y] if i % residual.block else [*sources, y]
    return h


def delta_attention(residual: Any, x: Tensor, run: Run) -> Tensor:
    sources = [x]
    for i in range(residual.sublayers):
        mixed = sources[0] if i == 0 else depth_read(residual.reads[str(i)], sources, residual.eps)
        y = run(i, x + mixed)
        x = x + y
        sources = [*sources[:-1], sources[-1] + y] if i % residual.block else [*sources, y]
    return x


def denseformer(residual: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for i in range(0, residual.sublayers, 2):
        x = x + run(i, x)
        x = x + run(i + 1, x)
        outputs.append(x)
        m = i // 2 + 1
        if m % residual.period == 0:
            weights = residual.sums[key] if (key := str(i + 2)) in residual.sums else [1.0]  # the last, of one term
            x = weighted(weights, outputs[m % residual.dilation :: residual.dilation])
    return x


def every_layer_counts(residual: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for i in range(0, residual.sublayers, 2):
        if i:
            x = weighted(residual.logits[str(i)].softmax(0), outputs)
        t = run(i, x)
        u = t + run(i + 1, x + t if residual.rereads_input else t)
        outputs.append(unit(u) if residual.normalized else u)
    final = str(residual.sublayers)
    return weighted(residual.logits[final].softmax(0), outputs) if final in residual.logits else outputs[-1]


def vertical_attention(residual: Any, x: Tensor, run: Run) -> Tensor:
    outputs = [x]
    for i in range(0, residual.sublayers, 2):
        if i:
            x = weighted(residual.logits[str(i)].softmax(0), [unit(u) for u in outputs])
        x = x + run(i, x)
        outputs.append(x + run(i + 1, x))
        x = outputs[-1]
    return x


def deep_cross_attention(residual: Any, x: Tensor, run: Run) -> Tensor:
    def reads(i: int) -> list[Tensor]:
        """One for each input, over all outputs or (k-DCA) the embedding, the sum of older ones and the last k."""
        k, grn = residual.last, residual.grns[str(i)]
        bank = outputs if k is None or len(outputs) <= k + 2 else [x, torch.stack(outputs[1:-k]).sum(0), *outputs[-k:]]
        inputs = []
        for way, constants in enumerate(grn.constant):
            extra = [0.0 if grn.query is None else (u * grn.query[way]).sum(-1, keepdim=True).relu() for u in bank]
            inputs.append(weighted([b + e for b, e in zip(constants, extra, strict=True)], bank))
        return inputs

    outputs = [x]
    for i in range(0, residual.sublayers, 2):
        inputs = reads(i) if i else [x]
        t = run(i, inputs[0] if len(inputs) == 1 else (inputs[0], inputs[1], inputs[2]))
        outputs.append(t + run(i + 1, inputs[0] + t))
    return reads(residual.sublayers)[0]


def muddformer(residual: Any, x: Tensor, run: Run) -> Tensor:
    def reads(i: int) -> list[Tensor]:
        dense = residual.dense[str(i)]
        hidden = F.linear(F.gelu(F.linear(unit(outputs[-1]), dense.down)), dense.up)
        weights = hidden.unflatten(-1, dense.constant.shape) + dense.constant
        return [weighted(way.unsqueeze(-1).unbind(-2), outputs) for way in weights.unbind(-2)]

    outputs = [x]
    for i in range(0, residual.sublayers, 2):
        if i == 0:
            t = x + run(0, x)
        else:
            query, key, value, stream = reads(i)
            t = stream + run(i, (query, key, value))
        outputs.append(t + run(i + 1, t))
    return reads(residual.sublayers)[0]


def streams(residual: Any, x: Tensor, run: Run, coefficients: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    h = torch.stack([x] * residual.streams, dim=-2)  # (..., n, D)
    for i in range(residual.sublayers):
        pre, post, res = coefficients(residual, h, i)
        y = run(i, torch.einsum("...n,...nd->...d", pre, h))
        h = torch.einsum("...ij,...jd->...id", res, h) + torch.einsum("...n,...d->...nd", post, y)
    return h.sum(-2)


def hyper_connections(residual: Any, x: Tensor, run: Run) -> Tensor:
    """The paper's matrices: h = A_m^T H, H' = A_r^T H + B^T y, each plus its dynamic part."""

    def coefficients(residual: Any, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        c = residual.connections[str(i)]
        if c.dynamic is None:
            shape = h.shape[:-2]
            return c.pre.expand(*shape, -1), c.post.expand(*shape, -1), c.res.T.expand(*shape, -1, -1)
        t = torch.tanh(F.linear(unit(h), c.dynamic))  # (..., n, n + 2)
        beta, alpha = c.post + c.post_scale * t[..., 0], c.pre + c.mix_scale * t[..., 1]
        return alpha, beta, (c.res + c.mix_scale * t[..., 2:]).mT

    return streams(residual, x, run, coefficients)


def constrained(residual: Any, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    n, mapping = residual.streams, residual.mappings[str(i)]
    raw = F.linear(unit(h.flatten(-2), eps=1e-20), mapping.weight)
    counts = torch.tensor([n, n, raw.shape[-1] - 2 * n], device=h.device)
    scales = mapping.scale.repeat_interleave(counts, output_size=raw.shape[-1])
    pre, post, res = (scales * raw + mapping.bias).split([n, n, raw.shape[-1] - 2 * n], -1)
    return pre.sigmoid(), 2 * post.sigmoid(), res


def mhc(residual: Any, x: Tensor, run: Run) -> Tensor:
    def coefficients(residual: Any, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = constrained(residual, h, i)
        matrix = logits.unflatten(-1, (residual.streams, residual.streams)).exp()
        for _ in range(residual.iterations):
            matrix = matrix / matrix.sum(-2, keepdim=True)
            matrix = matrix / matrix.sum(-1, keepdim=True)
        return pre, post, matrix

    return streams(residual, x, run, coefficients)


def mhc_lite(residual: Any, x: Tensor, run: Run) -> Tensor:
    def coefficients(residual: Any, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, logits = constrained(residual, h, i)
        return pre, post, torch.einsum("...r,rij->...ij", logits.softmax(-1), matrices)

    one = torch.eye(residual.streams, dtype=x.dtype, device=x.device)
    matrices = torch.stack([one[list(order)] for order in permutations(range(residual.streams))])
    return streams(residual, x, run, coefficients)


def deep_delta(residual: Any, x: Tensor, run: Run) -> Tensor:
    def compressed(i: int) -> Tensor:
        if residual.width == 1:
            return stream[..., 0]
        c = residual.compressors[str(i - i % 2)]
        columns = range(residual.width)
        if c.kernel.dim() == 2:  # over the columns, one before and the rest after
            padded = F.pad(stream, (1, residual.width))
            convolved = [weighted(c.kernel, [padded[..., o + j] for j in columns]) for o in columns]
        else:  # over the last four tokens
            padded = F.pad(stream, (0, 0, 0, 0, 3, 0))
            length = stream.shape[-3]
            taps = [padded[..., j : j + length, :, :] for j in range(4)]
            convolved = [weighted(c.kernel[:, o], [tap[..., o] for tap in taps]) for o in columns]
        return weighted(c.read, convolved)

    stream = torch.stack([x] * residual.width, dim=-1)  # (..., D, n)
    if residual.expander is not None:
        taps = [F.pad(x, (0, 0, 3 - j, 0))[..., : x.shape[-2], :] for j in range(4)]
        stream = torch.stack([weighted(taps_of, taps) for taps_of in residual.expander.kernel.unbind(1)], dim=-1)
    for i in range(residual.sublayers):
        h, w = compressed(i), residual.writes[str(i)]
        y = run(i, h)
        k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
        beta = 2 * F.linear(unit(h), w.beta_weight, w.beta_bias).sigmoid().unsqueeze(-1)
        value = unit(h) @ w.value_weight.T
        if residual.bounded:
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
    "delta-attnres": delta_attention,
    "denseformer": denseformer,
    "elc-bert": every_layer_counts,
    "vertical-attention": vertical_attention,
    "deepcrossattention": deep_cross_attention,
    "muddformer": muddformer,
    "hyper-connections": hyper_connections,
    "mhc": mhc,
    "mhc-lite": mhc_lite,
    "ddl": deep_delta,
}


def formula_of(residual: Residual) -> Formula:
    return FORMULAS[residual.spec.partition(":")[0]]
