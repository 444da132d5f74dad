"""Muon for matrices on one GPU, all of a shape at once; for stacks of them; and for those that ranks have parts of.

An update is the orthogonalised momentum of a whole matrix; a part must not be orthogonalised by itself. Left to
DTensor, every product of the iteration would be a collective, with the same work done on all ranks. Here as many
matrices of one shape as there are ranks change hands at once: each rank gets one of them whole, orthogonalises it and
deals it out again. Both ways they travel in bf16, which the iteration begins by rounding to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headwater._torch import adjusted_rate, newton_schulz
from headwater.train.distributed.parts import local

Group = dict[str, Any]  # parameters with their settings, as torch.optim has them


class _WithoutHost:
    """Steps without the host: while `found_inf` is one they change nothing, and the rate may be a tensor."""

    found_inf: Tensor | None = None

    def advance(
        self, like: Tensor, before: Tensor, gradients: Tensor, group: Group
    ) -> tuple[Tensor, Tensor, Any]:
        """Momenta (N, m, n) one step on, which way the parameters go, and the rate."""
        momentum = before.lerp(gradients, 1 - group["momentum"])
        update = momentum
        if group["nesterov"]:
            update = gradients.lerp(momentum, group["momentum"])
        update = self._orthogonalise(like, update, group)
        if self.found_inf is None:
            return momentum, update, group["lr"]
        # A bad step keeps its momentum, and its rate is zero. Times zero the update must be zero too.
        momentum = torch.where(self.found_inf > 0, before, momentum)
        rate = (1.0 - self.found_inf) * group["lr"]
        return momentum, update.nan_to_num(), rate

    def _orthogonalise(self, like: Tensor, update: Tensor, group: Group) -> Tensor:
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        if not isinstance(like, DTensor):
            return orthogonalise(update, *settings)
        # Matrices stay divided by experts; what divides a matrix itself is gathered.
        whole: list[Placement] = []
        for placement in like.placements:
            by_experts = isinstance(placement, Shard) and placement.dim == 0
            whole.append(placement if by_experts else Replicate())
        size = tuple(like.shape)
        matrices = redistribute(update, like, size, like.placements, whole)
        matrices = orthogonalise(matrices, *settings)
        return redistribute(matrices, like, size, whole, like.placements)


class BatchedMuon(_WithoutHost, torch.optim.Muon):
    """torch.optim.Muon for whole matrices on a GPU: those of one shape are orthogonalised together."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes one
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group)

    def _step_alike(self, parameters: list[Tensor], group: Group) -> None:
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        before = torch.stack(buffers)  # (N, m, n)
        gradients = torch.stack([cast(Tensor, p.grad) for p in parameters])
        momentum, update, rate = self.advance(parameters[0], before, gradients, group)
        scale = rate * adjusted_rate(1.0, group["adjust_lr_fn"], parameters[0].shape)
        # The state keeps its tensors, which a CUDA graph reads and writes in place.
        for i, parameter in enumerate(parameters):
            buffers[i].copy_(momentum[i])
            parameter.mul_(1 - rate * group["weight_decay"]).sub_(scale * update[i])


def orthogonalise(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Newton and Schulz's iteration in bf16 on matrices (N, m, n) at once: nearly orthogonal ones of the same span."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    # The Gram matrix of the shorter side is the smaller one.
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class StackedMuon(_WithoutHost, torch.optim.Optimizer):
    """Muon for stacks of matrices (E, m, n), the experts of a layer: each is orthogonalised by itself.

    Parameters are plain tensors or DTensors, which are divided by experts wherever that is possible and otherwise
    gathered. Settings and state are those of torch.optim.Muon.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        # torch's own refuses stacks, but knows the defaults.
        of_a_matrix = torch.optim.Muon([torch.zeros(1, 1)], **settings)
        super().__init__(params, of_a_matrix.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes one
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_stack(parameter, group)

    def _step_stack(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local(state["momentum_buffer"])
        gradient = local(cast(Tensor, parameter.grad))
        momentum, update, rate = self.advance(parameter, buffer, gradient, group)
        buffer.copy_(momentum)
        scale = rate * adjusted_rate(1.0, group["adjust_lr_fn"], parameter.shape[1:])
        local(parameter).mul_(1 - rate * group["weight_decay"]).sub_(scale * update)


class DividedMuon(torch.optim.Muon):
    """torch.optim.Muon for parameters that are DTensors: the same step, and a state of the same names."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes one
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            for batch in batches(matrices):
                self._step_batch(batch, group)

    def _step_batch(self, batch: list[DTensor], group: Group) -> None:
        momenta = [self._advance(parameter, group) for parameter in batch]
        updates = self._orthogonalise(batch[0], momenta, group)
        rate = group["lr"]
        for parameter, update in zip(batch, updates):
            scale = adjusted_rate(rate, group["adjust_lr_fn"], parameter.shape)
            part = parameter.to_local()
            part.mul_(1 - rate * group["weight_decay"])
            part.add_(update, alpha=-scale)

    def _advance(self, parameter: DTensor, group: Group) -> Tensor:
        """This rank's part of the momentum, one step on."""
        gradient, state = cast(DTensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        part, momentum = gradient.to_local(), state["momentum_buffer"].to_local()
        momentum.lerp_(part, 1 - group["momentum"])
        return part.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _orthogonalise(
        self, like: DTensor, updates: list[Tensor], group: Group
    ) -> Iterable[Tensor]:
        """Parts of matrices that are divided as `like` is, to the same parts of their orthogonalised wholes."""
        mesh, size = like.device_mesh, (len(updates), *like.shape)
        by_part: list[Placement] = []
        for placement in like.placements:
            # The stack has one axis more, before those of a matrix.
            if isinstance(placement, Shard):
                placement = Shard(placement.dim + 1)
            by_part.append(placement)
        by_matrix = [Shard(0)] * mesh.ndim
        parts = torch.stack([update.bfloat16() for update in updates])  # (N, m / ranks, n)
        matrices = redistribute(parts, like, size, by_part, by_matrix)  # (N / ranks, m, n)
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        for matrix in matrices:  # none, where there are fewer matrices than ranks
            matrix.copy_(newton_schulz(matrix, *settings))
        return redistribute(matrices, like, size, by_matrix, by_part)


def redistribute(
    part: Tensor,
    like: DTensor,
    size: tuple[int, ...],
    before: Sequence[Placement],
    after: Sequence[Placement],
) -> Tensor:
    """From one division of a tensor over the ranks of `like` to another."""
    shape = torch.Size(size)
    stride = torch.empty(size, device="meta").stride()
    mesh = like.device_mesh
    whole = DTensor.from_local(part, mesh, before, run_check=False, shape=shape, stride=stride)
    return whole.redistribute(placements=after).to_local()


def batches(parameters: Iterable[DTensor]) -> Iterator[list[DTensor]]:
    """Matrices that are alike in shape and division, as many at once as there are ranks to take one each."""
    groups: dict[object, list[DTensor]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape, parameter.device_mesh, parameter.placements].append(parameter)
    for matrices in groups.values():
        ranks = matrices[0].device_mesh.size()
        for first in range(0, len(matrices), ranks):
            yield matrices[first : first + ranks]
