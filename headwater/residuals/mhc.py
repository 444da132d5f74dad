"""Manifold-constrained Hyper-Connections: stream mixing is kept doubly stochastic, by Sinkhorn or
by construction."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import permutations
from math import factorial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend
from headwater.ops.streams import gate_streams, read_streams
from headwater.ops.streams.reference import gate_logits

from .base import Norm, State, apply_norm, hold
from .numerics import project
from .options import check_range
from .registry import register
from .streams import StreamsResidual

Start = Literal["identity", "uniform", "biased"]
Final = Literal["sum", "mean", "learned"]
# The logit of what starts almost absent: exp(-8) = 3e-4.
FAR = -8.0


class Mapping(nn.Module):
    """logits = scale * (weight RMSNorm(vec X)) + bias, for parts such as pre, post and res.

    `start`, `biases` and `scale` are where it begins: each part has a bias, and a scale of its own.
    """

    def __init__(
        self, width: int, start: str, biases: Sequence[Tensor], scale: float = 0.01
    ) -> None:
        super().__init__()
        self.sizes = tuple(map(len, biases))
        self.weight = nn.Parameter(torch.zeros(sum(self.sizes), width))
        self.bias = nn.Parameter(torch.cat(tuple(biases)))
        self.scale = nn.Parameter(torch.full((len(biases),), scale))
        if start == "uniform":
            nn.init.xavier_uniform_(self.weight)
        if start == "normal":
            nn.init.normal_(self.weight, std=0.02)

    def logits(self, z: Tensor) -> list[Tensor]:
        """Return the logits of each part, for products `z` with the weight."""
        return gate_logits(z, self.bias, self.scale, self.sizes)


def preference(streams: int, i: int) -> Tensor:
    """Return logits with which sublayer i prefers a stream, in turn: +1, the others -1."""
    return 2 * torch.eye(streams)[i % streams] - 1


class ConstrainedResidual(StreamsResidual):
    """n streams whose res is doubly stochastic; a subclass says how (`constrain`).

    A subclass fills `mappings`. `final`: the head sees the sum or the mean of the streams, or a
    learned read, whose weights are made as pre is. `eps` is added to those weights, `norm_eps` is
    that of the norm of vec X.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int,
        start: str,
        backend: Backend,
        final: Final = "sum",
        eps: float = 0.0,
        norm_eps: float = 1e-20,
    ) -> None:
        super().__init__(dim, sublayers, streams=streams, backend=backend)
        self.at_start = "scaled" if start == "identity" else "different"
        # The reads of two streams, sigmoid(1) and sigmoid(-1), sum to one.
        if start == "identity" and streams == 2 and final != "sum" and not eps:
            self.at_start = "exact"
        self.final = final
        self.eps = eps
        self.norm_eps = norm_eps
        self.mappings = nn.ModuleDict()

    def fill(self, start: str, res: Tensor) -> None:
        """Fill `mappings`; `res` are the logits that res starts from, unless all is at random."""
        width, zeros = self.streams * self.dim, torch.zeros(self.streams)
        scale = 1.0 if start == "normal" else 0.01
        for i in range(self.sublayers):
            pre = preference(self.streams, i)
            biases = [pre, pre if start == "biased" else zeros, res]
            if start in ("uniform", "normal"):
                biases = [zeros, zeros, torch.zeros_like(res)]
            self.mappings[str(i)] = Mapping(width, start, biases, scale)
        if self.final == "learned":
            self.mappings[str(self.sublayers)] = Mapping(width, start, [zeros], scale)

    def projection(self, i: int) -> tuple[Tensor, float]:
        return self._mapping(i).weight, self.norm_eps

    def _mapping(self, i: int) -> Mapping:
        return cast(Mapping, self.mappings[self.keys[i]])

    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.constrain(cast(Tensor, z), self._mapping(i))

    def final_weights(self, z: Tensor | None) -> Tensor:
        """Return the weights (..., n) of the learned final read."""
        (logits,) = self._mapping(self.sublayers).logits(cast(Tensor, z))
        return logits.sigmoid() + self.eps

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        if self.final == "learned":
            z, x, factors = self._project(state[0], self.sublayers)
            pre = hold(self.final_weights(z))
            total = read_streams(x, pre, factors, backend=self._now())
        else:
            total = super()._end(state, None)
        return apply_norm(norm, total / self.streams if self.final == "mean" else total)

    def _weights(self, state: State, i: int) -> Tensor:
        if i == self.sublayers and self.final == "learned":
            pre = self.final_weights(self._project(state[0], i)[0])
            return pre.movedim(-1, 0).unsqueeze(-1)
        weights = super()._weights(state, i)
        is_mean = i == self.sublayers and self.final == "mean"
        return weights / self.streams if is_mean else weights

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
        biased has a post that is biased as pre is (the mhc-lite repository), and normal has W from
        N(0, 0.02), biases of zero and scales of one (transformers' DeepSeek-V4).
    `final`: the head sees the sum of the streams, their mean (GLM-5.3), or a learned read with
        weights sigmoid(a) + eps (DeepSeek-V4).
    `eps`: is added to pre, to the matrix after the first step over columns, and to every other sum
        that it is divided by; above zero the gates run in PyTorch, everything else in kernels.
    `norm_eps`: eps of the norm of vec X.
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: with start=identity and eps=0 streams stay equal, so it is the plain residual
    up to a scale, and the bias of pre is what lets them part; uniform is near that but not equal,
    and biased and normal are different. The paper gives scales of 0.01 and nothing else of the start.
    Cost: (n^2 + 2 n)(n D + 1) + 3 parameters per sublayer, and n (n D + 1) + 1 of a learned final
    read; the state holds n D. mHC, arXiv 2512.24880.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        iterations: int = 20,
        start: Literal[Start, "normal"] = "identity",
        final: Final = "sum",
        eps: float = 0.0,
        norm_eps: float = 1e-20,
        backend: Backend = "auto",
    ) -> None:
        # One stream has nothing to mix with.
        check_range("streams", streams, 2)
        check_range("iterations", iterations, 1)
        near_identity = FAR * (1 - torch.eye(streams)).flatten()
        options: Any = {"streams": streams, "start": start, "backend": backend}
        options |= {"final": final, "eps": eps, "norm_eps": norm_eps}
        super().__init__(dim, sublayers, **options)
        self.fill(start, near_identity)
        self.iterations = iterations
        # Rows sum to a little less than one then, and gates have no kernel: they gain from a
        # compiled model.
        if eps:
            self.at_start = "different"
            self.fused = False

    def constrain(self, z: Tensor, mapping: Mapping) -> tuple[Tensor, Tensor, Tensor]:
        if not self.eps:
            backend = self._now()
            return gate_streams(z, mapping.bias, mapping.scale, self.iterations, backend=backend)
        pre, post, res = mapping.logits(z)
        matrix = res.unflatten(-1, (self.streams, self.streams))
        return pre.sigmoid() + self.eps, 2 * post.sigmoid(), self._balanced(matrix)

    def _balanced(self, logits: Tensor) -> Tensor:
        """Return Sinkhorn's iteration with eps in every step, (..., n, n)."""
        matrix = logits.softmax(-2) + self.eps
        for step in range(1, 2 * self.iterations):
            # Rows and columns in turn; the softmax was the first step over columns.
            matrix = matrix / (matrix.sum(-1 if step % 2 else -2, keepdim=True) + self.eps)
        return matrix


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
        super().__init__(dim, sublayers, **options)
        self.fill(start, identity_first)
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
        pre, post, res = mapping.logits(z)
        # A convex mixture of permutations is doubly stochastic.
        mixture = project(res.softmax(-1), self.permutations)
        square = mixture.unflatten(-1, (self.streams, self.streams))
        return pre.sigmoid(), 2 * post.sigmoid(), square
