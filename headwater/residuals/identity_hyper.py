"""Hyper-Connections whose streams do not mix: learned reads and writes, and the identity between."""

from math import log
from typing import Any, Literal

import torch
from torch import Tensor

from headwater.ops.routing import Backend

from .mhc import ConstrainedResidual, Mapping, preference
from .options import check_range
from .registry import register
from .streams import unmixed


@register("identity-hc")
class IdentityHyperResidual(ConstrainedResidual):
    """x = (e + sigmoid(a)) X;  X'_j = X_j + (e + m sigmoid(b_j)) f(x), with a, b linear in RMSNorm(vec X).

    The head sees a read of its own, of the same form.
    `streams`: n, the number of streams.
    `magnitude`: m, the largest factor of a write, above one if a write of one is to start it.
    `start`: identity has W = 0, a pre that is biased to stream i mod n (+1, the others -1) and a
        post of one, and normal has W from N(0, 0.02), scales of 0.01, a pre of 1/n and a post of
        m / 2 (transformers).
    `eps`: e, is added to every read and write.
    `norm_eps`: eps of the norm of vec X.
    `backend`: reads and writes run as in `headwater.depth_attention`, by the kernels of mhc.
    At initialisation: with start=identity streams stay equal, so it is the plain residual up to a
    scale, and the bias of pre is what lets them part.
    Cost: 2 n (n D + 1) + 2 parameters per sublayer; the state holds n D. Hy-V4, in transformers
    5.23.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        magnitude: float = 2.0,
        start: Literal["identity", "normal"] = "identity",
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        backend: Backend = "auto",
    ) -> None:
        check_range("streams", streams, 2)
        options: Any = {"eps": eps, "norm_eps": norm_eps, "final": "learned", "backend": backend}
        super().__init__(dim, sublayers, streams=streams, start=start, **options)
        self.magnitude = magnitude
        width, zeros = streams * dim, torch.zeros(streams)
        # A write of one, if the magnitude allows it, and reads that sum to one.
        one = torch.full((streams,), (1 - eps) / magnitude).logit(eps=1e-6)
        mean = zeros - log(streams - 1)
        for i in range(sublayers):
            starts = {"identity": [preference(streams, i), one], "normal": [mean, zeros]}
            self.mappings[str(i)] = Mapping(width, start, starts[start])
        last = zeros if start == "identity" else mean
        self.mappings[str(sublayers)] = Mapping(width, start, [last])

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        pre, post = mapping.logits(z)
        post = self.magnitude * post.sigmoid() + self.eps
        return pre.sigmoid() + self.eps, post, unmixed(post)

    def flops_per_token(self) -> int:
        # A read and a write; streams do not mix.
        moves = 2 * self.streams * self.dim * self.sublayers
        return 2 * (self.coefficient_products() + moves)
