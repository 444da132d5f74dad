"""Makes the conformance vectors of this folder: python tests/vectors/make.py [specs]

One safetensors file for each residual: fixed sources in, reads and gradients out, so that an implementation in any
framework can be checked without running a sublayer. README.md says what the names mean.
"""

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from headwater.residuals import build, names
from headwater.residuals.record import replay

FOLDER = Path(__file__).parent
DIM, SUBLAYERS, BATCH, TOKENS = 16, 6, 2, 3
INPUTS = ("query", "key", "value")
OPTIONS = [
    "attnres-block:block=4",
    "attnres-full:heads=4",
    "attnres-full:query=projected",
    "attnres-full:weights=sigmoid",
    "attnres-full:key_norm=false",
    "highway:gate=channel",
    "denseformer:dilation=2,period=1",
    "elc-bert:variant=base",
    "elc-bert:variant=normalized",
    "deepcrossattention:version=v1",
    "deepcrossattention:version=v2",
    "deepcrossattention:last=1",
    "hyper-connections:streams=2,form=static",
    "ddl:width=4,compress=channel",
    "ddl:width=2,compress=token,expand=token",
    "ddl:value=linear",
    "laurel:form=previous,rank=4",
    "laurel:form=weighted",
    "delta-attnres:block=2",
    "depth-window:maps=reader",
]
# Fewer parameters
SMALLER = {"mhc": "mhc:streams=3", "mhc-lite": "mhc-lite:streams=3", "laurel": "laurel:rank=4"}


def specs() -> list[str]:
    return [*(SMALLER.get(name, name) for name in names()), *OPTIONS]


def flat(reads: list) -> dict[str, torch.Tensor]:
    """Reads by name: read.3, or read.2.query and so on where there are three."""
    named = {}
    for i, read in enumerate(reads):
        if isinstance(read, tuple):
            named |= {f"read.{i}.{name}": x for name, x in zip(INPUTS, read, strict=True)}
        else:
            named[f"read.{i}"] = read
    return named


def evaluate(spec: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reads and gradients in fp64 for the sources, parameters and cotangents given."""
    residual = build(spec, DIM, SUBLAYERS).double()
    with torch.no_grad():
        for name, p in residual.named_parameters():
            p.copy_(given[f"parameter.{name}"])
    sources = [given[f"source.{i}"].double().requires_grad_() for i in range(SUBLAYERS + 1)]
    reads = flat(replay(residual, sources))
    total = sum((x * given[f"cotangent.{name}"].double()).sum() for name, x in reads.items())
    leaves = {f"source.{i}": x for i, x in enumerate(sources)}
    leaves |= {f"parameter.{name}": p for name, p in residual.named_parameters()}
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return reads | {f"gradient.{name}": g for name, g in zip(leaves, gradients, strict=True)}


def make(spec: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    residual = build(spec, DIM, SUBLAYERS)
    given = {f"source.{i}": torch.randn(BATCH, TOKENS, DIM) for i in range(SUBLAYERS + 1)}
    names_of_reads = flat(replay(residual, [given[f"source.{i}"] for i in range(SUBLAYERS + 1)]))
    given |= {f"cotangent.{name}": torch.randn(BATCH, TOKENS, DIM) for name in names_of_reads}
    given |= {
        f"parameter.{n}": (p + 0.3 * torch.randn(p.shape)).detach()
        for n, p in residual.named_parameters()
    }
    return given | evaluate(spec, given)


def file_of(spec: str) -> Path:
    return FOLDER / (re.sub(r"[^a-z0-9-]+", "_", spec) + ".safetensors")


def main() -> None:
    for spec in sys.argv[1:] or specs():
        tensors = {name: x.detach().float().contiguous() for name, x in make(spec).items()}
        layout = {
            "sublayers": SUBLAYERS,
            "kinds": ["attention", "mlp"] * (SUBLAYERS // 2),
            "dim": DIM,
        }
        save_file(tensors, file_of(spec), {"residual": spec, "layout": json.dumps(layout)})


if __name__ == "__main__":
    main()
