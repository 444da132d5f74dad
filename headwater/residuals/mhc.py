"""Manifold-constrained Hyper-Connections: stream mixing is kept doubly stochastic, by Sinkhorn or by construction."""

from abc import abstractmethod
from itertools import permutations
from math import factorial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend
from headwater.ops.streams import gate_streams
from headwater.ops.streams.reference import gate_logits

from .numerics import project
from .registry import register
from .streams import StreamsResidual

Start = Literal["identity", "uniform", "biased"]
FAR = -8.0  # logit of what starts almost absent: exp(-8) = 3e-4


class Mapping(nn.Module):
    """logits = scale * (weight RMSNorm(vec X)) + bias, for pre (n), post (n) and res (`mixtures`) in this order."""

    def __init__(
        self, dim: int, streams: int, mixtures: int, res_bias: Tensor, chosen: int, start: Start
    ) -> None:
        super().__init__()
        self.sizes = (streams, streams, mixtures)
        outputs = 2 * streams + mixtures
        self.weight = nn.Parameter(torch.zeros(outputs, streams * dim))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        if start == "uniform":
            nn.init.xavier_uniform_(self.weight)
            return
        one = 2 * torch.eye(streams)[chosen] - 1  # +1 for the chosen stream, -1 for the others
        post = one if start == "biased" else torch.zeros(streams)
        self.bias.data.copy_(torch.cat((one, post, res_bias)))


class ConstrainedResidual(StreamsResidual):
    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int,
        mixtures: int,
        res_bias: Tensor,
        start: Start,
        backend: Backend,
    ) -> None:
        super().__init__(dim, sublayers, streams=streams, backend=backend)
        self.at_start = "scaled" if start == "identity" else "different"
        self.mappings = nn.ModuleDict(
            {
                str(i): Mapping(dim, streams, mixtures, res_bias, i % streams, start)
                for i in range(sublayers)
            }
        )

    def projection(self, i: int) -> tuple[Tensor, float]:
        return cast(Mapping, self.mappings[self.keys[i]]).weight, 1e-20

    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        assert z is not None
        return self.constrain(z, cast(Mapping, self.mappings[self.keys[i]]))

    @abstractmethod
    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post, and a doubly stochastic res."""

    def coefficient_products(self) -> int:
        return sum(cast(Mapping, mapping).weight.numel() for mapping in self.mappings.values())


@register("mhc")
class MHCResidual(ConstrainedResidual):
    """x = sigmoid(a) X;  X' = Sinkhorn(exp(C)) X + 2 sigmoid(b) f(x), with a, b, C linear in RMSNorm(vec X).

    `streams`: n, the number of streams.
    `iterations`: the number of Sinkhorn steps, each over columns and then over rows, in fp32.
    `start`: identity has W = 0, a pre that is biased to stream i mod n (+1, the others -1), a post of one and a res
        near the identity, uniform has a random W and biases of zero (Megatron-LM), and biased has a post that is
        biased as pre is (the mhc-lite repository).
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: with start=identity streams stay equal, so it is the plain residual up to a scale, and the bias
    of pre is what lets them part; uniform is near that but not equal, and biased is different. The paper gives scales
    of 0.01 and nothing else of the start.
    Cost: (n^2 + 2 n)(n D + 1) + 3 parameters per sublayer; the state holds n D. mHC, arXiv 2512.24880.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        iterations: int = 20,
        start: Start = "identity",
        backend: Backend = "auto",
    ) -> None:
        if streams < 2:
            raise ValueError(
                f"streams must be at least 2, since one stream has nothing to mix with, got {streams}"
            )
        if iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {iterations}")
        near_identity = FAR * (1 - torch.eye(streams)).flatten()
        options: Any = {
            "mixtures": streams**2,
            "res_bias": near_identity,
            "start": start,
            "backend": backend,
        }
        super().__init__(dim, sublayers, streams=streams, **options)
        self.iterations = iterations

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        return gate_streams(z, mapping.bias, mapping.scale, self.iterations, backend=self._now())


def all_permutations(like: Tensor, n: int) -> Tensor:
    """Their matrices as columns, (n n, n!), of the dtype and on the device of a tensor."""
    identity = torch.eye(n, device="cpu")
    return torch.stack([identity[list(order)].flatten() for order in permutations(range(n))], 1).to(
        like
    )


@register("mhc-lite")
class MHCLiteResidual(ConstrainedResidual):
    """x = sigmoid(a) X;  X' = (sum_r softmax(c)_r P_r) X + 2 sigmoid(b) f(x), over all n! permutations P_r.

    Doubly stochastic exactly, without iterations. a, b, c are linear in RMSNorm(vec X), times 0.01 at start.
    `streams`: n, the number of streams.
    `start`: identity gives the identity permutation a logit of 0, the others -8, and a post of one, biased follows the
        authors' repository, and uniform has a random W and biases of zero.
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: with start=identity it is the plain residual up to a scale.
    Cost: (n! + 2 n)(n D + 1) + 3 parameters per sublayer; the state holds n D. mHC-lite, arXiv 2601.05732.
    """

    permutations: Tensor

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        start: Start = "identity",
        backend: Backend = "auto",
    ) -> None:
        if not 2 <= streams <= 5:
            raise ValueError(
                f"streams must lie between 2 and 5, since all n! permutations are mixed, got {streams}"
            )
        count = factorial(streams)
        identity_first = FAR * (1 - torch.eye(count)[0])
        options: Any = {
            "mixtures": count,
            "res_bias": identity_first,
            "start": start,
            "backend": backend,
        }
        super().__init__(dim, sublayers, streams=streams, **options)
        self.register_buffer(
            "permutations", all_permutations(identity_first, streams), persistent=False
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the module. After `to_empty` the permutations are made again: no checkpoint has them."""
        super()._apply(*args, **kwargs)
        columns = all_permutations(self.permutations, self.streams)
        if columns.is_meta or not torch.equal(
            columns, self.permutations
        ):  # else the memory stays what others know it as
            self.permutations = columns
        return self

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = gate_logits(z, mapping.bias, mapping.scale, mapping.sizes)
        mixed = project(res.softmax(-1), self.permutations).unflatten(
            -1, (self.streams, self.streams)
        )
        return pre.sigmoid(), 2 * post.sigmoid(), mixed
