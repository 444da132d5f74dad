"""Compares every arm with its formula, written out read by read, at random parameters in fp64.

PYTHONPATH=.:studies/better-residual python studies/better-residual/check.py
"""

import arms
import torch
import torch.nn.functional as F
from screen import ARMS
from torch import Tensor

from headwater.residuals import Residual, build

DIM, SUBLAYERS, KINDS = 16, 24, ("attention", "mlp") * 12
TOLERANCE = 1e-12


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def sources_of(residual: arms.BlockReads, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    """The embedding and a sum for each block begun by these outputs."""
    borders = [start for start in residual.starts if start < len(outputs)]
    ends = [*borders[1:], len(outputs)]
    sums = [sum(outputs[a + 1 : b], outputs[a]) for a, b in zip(borders, ends, strict=False)]
    return [x, *sums[: len(borders)]]


def plain_read(
    residual: arms.BlockReads, x: Tensor, outputs: list[Tensor], i: int
) -> tuple[Tensor, ...]:
    """The inputs of read `i`, by the formula of the docstring."""
    if i == 0:
        return (x,)
    p = residual.reads[str(i)]
    sources = sources_of(residual, x, outputs)
    values = sources
    if residual.gains is not None:
        places = (*residual.starts[: len(sources) - 1], i)
        values = [
            normed(source, residual.gains[str(k)])
            for source, k in zip(sources, places, strict=True)
        ]
    newest = sources[-1]
    if residual.form == "added":
        newest = sum(outputs, x)
    down = p.down
    if residual.shares_token and p.up is not None and not residual.opens(i):
        opener = max(start for start in residual.starts if start < i)
        newest = sources_of(residual, x, outputs[:opener])[-1]
        down = residual.reads[str(opener)].down
    inputs = []
    logits_of = p.ways * (2 if residual.form == "difference" else 1)
    logits = []
    for way in range(logits_of):
        row = []
        for n, source in enumerate(sources):
            logit = torch.zeros(x.shape[:-1], dtype=x.dtype)
            if p.query is not None:
                key = normed(source, 1.0 if p.key_weight is None else p.key_weight)
                logit = logit + key @ p.query[way]
            if p.bias is not None:
                logit = logit + p.bias[way, n]
            if p.up is not None:
                hidden = F.gelu(normed(newest) @ down.T)
                logit = logit + residual.token_rate * hidden @ p.up[way * len(sources) + n]
            row.append(logit)
        logits.append(torch.stack(row))
    for way in range(p.ways):
        weights = logits[way] if residual.form == "added" else logits[way].softmax(0)
        if residual.form == "difference":
            weights = weights - p.share[way] * logits[p.ways + way].softmax(0)
        read = sum(w.unsqueeze(-1) * v for w, v in zip(weights, values, strict=True))
        inputs.append(read + newest if residual.form == "added" else read)
    if len(inputs) == 2:
        inputs = [inputs[0], inputs[0], inputs[1]]
    return tuple(inputs)


def largest_error(residual: Residual) -> float:
    """The largest difference of any read from its formula, over a pass through all sublayers."""
    assert isinstance(residual, arms.BlockReads)
    for parameter in residual.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + parameter
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    outputs: list[Tensor] = []
    errors = []
    state = residual.begin(x)
    for i in range(SUBLAYERS):
        read, state = residual.read(state, i)
        inputs = read if isinstance(read, tuple) else (read,)
        for part, expected in zip(inputs, plain_read(residual, x, outputs, i), strict=True):
            errors.append((part - expected).abs().max().item())
        y = torch.randn_like(x) * 0.3
        state = residual.write(state, i, y)
        if residual.write_gains is not None:
            y = normed(y, residual.write_gains[str(i)])
        outputs.append(y)
    expected = plain_read(residual, x, outputs, SUBLAYERS)[0]
    errors.append((residual.end(state) - expected).abs().max().item())
    return max(errors)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    for name, spec in ARMS.items():
        if not spec.startswith("block-reads"):
            continue
        error = largest_error(build(spec, DIM, SUBLAYERS, KINDS))
        print(f"{name:24} {error:.1e}")
        assert error < TOLERANCE, name


if __name__ == "__main__":
    main()
