"""Mixing matrices of the residuals of released models: `python studies/mixing-matrices/released.py`

Draws figure.svg, which docs/reference/released.md shows: the last of 256 random tokens in a decoder of 6 layers and
width 64. The residual's parameters begin where the release starts them and are moved at random, far enough to show.
"""

from pathlib import Path

import torch

from headwater import Decoder, ModelConfig
from headwater.analyze.plot import Map, picture
from headwater.residuals import mixing, record
from headwater.residuals.measures import shares

RELEASED = {
    "Kimi K3": "attnres-block:block=4",
    "Inkling-2": "attnres-routed:block=4",
    "DeepSeek-V4": "mhc:start=normal,eps=1e-6,norm_eps=1e-6,final=learned",
    "GLM-5.3": "mhc:start=normal,eps=1e-6,norm_eps=1e-6,final=mean",
    "Hy-V4": "identity-hc:start=normal",
    "Qwen4Exp": "gated-hc:start=normal",
}


@torch.no_grad()
def map_of(release: str, spec: str) -> Map:
    torch.manual_seed(0)
    settings = {"vocab_size": 256, "dim": 64, "layers": 6, "heads": 4, "mlp_dim": 176}
    model = Decoder(ModelConfig(**settings, context=256, residual=spec))
    for parameter in model.residual.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape))
    with record(model.residual) as trace:
        model(torch.randint(0, 256, (1, 256)))
    matrix = shares(mixing(model.residual, trace.sources))[..., 0, -1]
    rows = [[share * (i + 1) for share in row] for i, row in enumerate(matrix.tolist())]
    return Map(release, "block", rows)


if __name__ == "__main__":
    maps = [map_of(release, spec) for release, spec in RELEASED.items()]
    figure = picture(maps, "Mixing matrices of the residuals of released models")
    (Path(__file__).parent / "figure.svg").write_text(figure)
