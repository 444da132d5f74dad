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


class _WithoutHost:
    """Steps without the host: while `found_inf` is one they change nothing, and the rate may be a tensor."""

    found_inf: Tensor | None = None

    def advance(
        self, like: Tensor, before: Tensor, gradients: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Any]:
        """Momenta (N, m, n) one step on, which way the parameters go, and the rate."""
        momentum = before.lerp(gradients, 1 - group["momentum"])
        update = gradients.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = self._orthogonalise(like, update, group)
        if self.found_inf is None:
            return momentum, update, group["lr"]
        momentum = torch.where(self.found_inf > 0, before, momentum)
        return (
            momentum,
            update.nan_to_num(),
            (1.0 - self.found_inf) * group["lr"],
        )  # times zero it must be zero

    def _orthogonalise(self, like: Tensor, update: Tensor, group: dict[str, Any]) -> Tensor:
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        if not isinstance(like, DTensor):
            return orthogonalise(update, *settings)
        # Matrices stay divided by experts; what divides a matrix itself is gathered.
        whole: list[Placement] = []
        for placement in like.placements:
            by_experts = isinstance(placement, Shard) and placement.dim == 0
            whole.append(placement if by_experts else Replicate())
        matrices = redistribute(update, like, tuple(like.shape), like.placements, whole)
        return redistribute(
            orthogonalise(matrices, *settings), like, tuple(like.shape), whole, like.placements
        )


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

    def _step_alike(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        before, gradients = (
            torch.stack(buffers),
            torch.stack([cast(Tensor, p.grad) for p in parameters]),
        )  # (N, m, n)
        momentum, update, rate = self.advance(parameters[0], before, gradients, group)
        scale = rate * adjusted_rate(1.0, group["adjust_lr_fn"], parameters[0].shape)
        for parameter, buffer, now, direction in zip(
            parameters, buffers, momentum, update, strict=True
        ):
            buffer.copy_(now)
            parameter.mul_(1 - rate * group["weight_decay"]).sub_(scale * direction)


def orthogonalise(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Newton and Schulz's iteration in bf16 on matrices (N, m, n) at once: nearly orthogonal ones of the same span."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class StackedMuon(_WithoutHost, torch.optim.Optimizer):
    """Muon for stacks of matrices (E, m, n), the experts of a layer: each is orthogonalised by itself. Plain tensors or
    DTensors, which are divided by experts wherever that is possible and otherwise gathered; settings and state are
    those of torch.optim.Muon."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        of_a_matrix = torch.optim.Muon(
            [torch.zeros(1, 1)], **settings
        )  # which refuses stacks, and knows its defaults
        super().__init__(params, of_a_matrix.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes one
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._step_stack(parameter, group)

    def _step_stack(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        part, buffer, gradient = (
            local(x) for x in (parameter, state["momentum_buffer"], cast(Tensor, parameter.grad))
        )
        momentum, update, rate = self.advance(parameter, buffer, gradient, group)
        buffer.copy_(momentum)
        scale = rate * adjusted_rate(1.0, group["adjust_lr_fn"], parameter.shape[1:])
        part.mul_(1 - rate * group["weight_decay"]).sub_(scale * update)


class DividedMuon(torch.optim.Muon):
    """torch.optim.Muon for parameters that are DTensors: the same step, and a state of the same names."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes one
        for group in self.param_groups:
            for batch in batches(p for p in group["params"] if p.grad is not None):
                updates = [self._advance(parameter, group) for parameter in batch]
                for parameter, update in zip(batch, self._orthogonalise(batch[0], updates, group)):
                    part, rate = parameter.to_local(), group["lr"]
                    part.mul_(1 - rate * group["weight_decay"])
                    part.add_(
                        update, alpha=-adjusted_rate(rate, group["adjust_lr_fn"], parameter.shape)
                    )

    def _advance(self, parameter: DTensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of the momentum, one step on."""
        gradient, state = cast(DTensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        part, momentum = gradient.to_local(), state["momentum_buffer"].to_local()
        momentum.lerp_(part, 1 - group["momentum"])
        return part.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _orthogonalise(
        self, like: DTensor, updates: list[Tensor], group: dict[str, Any]
    ) -> Iterable[Tensor]:
        """Parts of matrices that are divided as `like` is, to the same parts of their orthogonalised wholes."""
        mesh, size = like.device_mesh, (len(updates), *like.shape)
        by_part = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
        by_matrix = [Shard(0)] * mesh.ndim
        parts = torch.stack([update.bfloat16() for update in updates])  # (N, m / ranks, n)
        matrices = redistribute(parts, like, size, by_part, by_matrix)  # (N / ranks, m, n)
        for matrix in matrices:  # none, where there are fewer matrices than ranks
            matrix.copy_(
                newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
            )
        return redistribute(matrices, like, size, by_matrix, by_part)


def redistribute(
    part: Tensor,
    like: DTensor,
    size: tuple[int, ...],
    before: Sequence[Placement],
    after: Sequence[Placement],
) -> Tensor:
    """From one division of a tensor over the ranks of `like` to another."""
    stride = torch.empty(size, device="meta").stride()
    whole = DTensor.from_local(
        part, like.device_mesh, before, run_check=False, shape=torch.Size(size), stride=stride
    )
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
