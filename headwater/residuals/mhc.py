"""Manifold-constrained Hyper-Connections: stream mixing is kept doubly stochastic, by Sinkhorn or
by construction."""

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
from .options import check_range
from .registry import register
from .streams import StreamsResidual

Start = Literal["identity", "uniform", "biased"]
# The logit of what starts almost absent: exp(-8) = 3e-4.
FAR = -8.0


class Mapping(nn.Module):
    """logits = scale * (weight RMSNorm(vec X)) + bias, for pre (n), post (n) and res, in this order.

    `preferred`: the stream that pre prefers at the start.
    """

    def __init__(
        self, dim: int, streams: int, res_bias: Tensor, preferred: int, start: Start
    ) -> None:
        super().__init__()
        self.sizes = (streams, streams, len(res_bias))
        outputs = sum(self.sizes)
        self.weight = nn.Parameter(torch.zeros(outputs, streams * dim))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        if start == "uniform":
            nn.init.xavier_uniform_(self.weight)
            return
        # +1 for the preferred stream, -1 for the others.
        pre = 2 * torch.eye(streams)[preferred] - 1
        post = {"biased": pre, "identity": torch.zeros(streams)}[start]
        self.bias.data.copy_(torch.cat((pre, post, res_bias)))


class ConstrainedResidual(StreamsResidual):
    """n streams whose res is doubly stochastic; a subclass says how (`constrain`).

    `res_bias`: the logits that res starts from.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int,
        res_bias: Tensor,
        start: Start,
        backend: Backend,
    ) -> None:
        super().__init__(dim, sublayers, streams=streams, backend=backend)
        self.at_start = "scaled" if start == "identity" else "different"
        self.mappings = nn.ModuleDict()
        for i in range(sublayers):
            # A sublayer begins with a stream of its own, in turn.
            self.mappings[str(i)] = Mapping(dim, streams, res_bias, i % streams, start)

    def projection(self, i: int) -> tuple[Tensor, float]:
        return cast(Mapping, self.mappings[self.keys[i]]).weight, 1e-20

    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        mapping = cast(Mapping, self.mappings[self.keys[i]])
        return self.constrain(cast(Tensor, z), mapping)

    @abstractmethod
    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre, post, and a doubly stochastic res."""

    def coefficient_products(self) -> int:
        mappings = cast(list[Mapping], self.mappings.values())
        return sum(mapping.weight.numel() for mapping in mappings)


@register("mhc")
class MHCResidual(ConstrainedResidual):
    """x = sigmoid(a) X;  X' = Sinkhorn(exp(C)) X + 2 sigmoid(b) f(x), with a, b, C linear in RMSNorm(vec X).

    `streams`: n, the number of streams.
    `iterations`: the number of Sinkhorn steps, each over columns and then over rows, in fp32.
    `start`: identity has W = 0, a pre that is biased to stream i mod n (+1, the others -1), a post
        of one and a res near the identity, uniform has a random W and biases of zero (Megatron-LM),
        and biased has a post that is biased as pre is (the mhc-lite repository).
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: with start=identity streams stay equal, so it is the plain residual up to a
    scale, and the bias of pre is what lets them part; uniform is near that but not equal, and
    biased is different. The paper gives scales of 0.01 and nothing else of the start.
    Cost: (n^2 + 2 n)(n D + 1) + 3 parameters per sublayer; the state holds n D. mHC, arXiv
    2512.24880.
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
        # One stream has nothing to mix with.
        check_range("streams", streams, 2)
        check_range("iterations", iterations, 1)
        near_identity = FAR * (1 - torch.eye(streams)).flatten()
        options: Any = {"streams": streams, "start": start, "backend": backend}
        super().__init__(dim, sublayers, res_bias=near_identity, **options)
        self.iterations = iterations

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        backend = self._now()
        return gate_streams(z, mapping.bias, mapping.scale, self.iterations, backend=backend)


def all_permutations(like: Tensor, n: int) -> Tensor:
    """Return the matrices of all permutations as columns, (n n, n!), with the dtype and on the
    device of a tensor."""
    identity = torch.eye(n, device="cpu")
    matrices = []
    for order in permutations(range(n)):
        matrices.append(identity[list(order)].flatten())
    return torch.stack(matrices, 1).to(like)


@register("mhc-lite")
class MHCLiteResidual(ConstrainedResidual):
    """x = sigmoid(a) X;  X' = (sum_r softmax(c)_r P_r) X + 2 sigmoid(b) f(x), over all n! permutations P_r.

    Doubly stochastic exactly, without iterations. a, b, c are linear in RMSNorm(vec X), times 0.01
    at start.
    `streams`: n, the number of streams.
    `start`: identity gives the identity permutation a logit of 0, the others -8, and a post of one,
        biased follows the authors' repository, and uniform has a random W and biases of zero.
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: with start=identity it is the plain residual up to a scale.
    Cost: (n! + 2 n)(n D + 1) + 3 parameters per sublayer; the state holds n D. mHC-lite, arXiv
    2601.05732.
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
        # All n! permutations are mixed; the identity is the first.
        check_range("streams", streams, 2, 5)
        identity_first = FAR * (1 - torch.eye(factorial(streams))[0])
        options: Any = {"streams": streams, "start": start, "backend": backend}
        super().__init__(dim, sublayers, res_bias=identity_first, **options)
        columns = all_permutations(identity_first, streams)
        self.register_buffer("permutations", columns, persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the module. After `to_empty` the permutations are made again: no checkpoint
        has them."""
        super()._apply(*args, **kwargs)
        columns = all_permutations(self.permutations, self.streams)
        # Values that are still right stay in the memory that others share.
        if columns.is_meta or not torch.equal(columns, self.permutations):
            self.permutations = columns
        return self

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = gate_logits(z, mapping.bias, mapping.scale, mapping.sizes)
        # A convex mixture of permutations is doubly stochastic.
        mixture = project(res.softmax(-1), self.permutations)
        square = mixture.unflatten(-1, (self.streams, self.streams))
        return pre.sigmoid(), 2 * post.sigmoid(), square
