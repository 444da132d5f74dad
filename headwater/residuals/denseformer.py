"""DenseFormer: between layers, a learned weighted sum over the outputs of all earlier layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwater.ops.banks import mix_bank
from headwater.ops.routing import Backend

from .base import State
from .layerwise import LayerwiseResidual, spread
from .registry import register


@register("denseformer")
class DenseFormerResidual(LayerwiseResidual):
    """Y_m = sum_j a_{mj} X_j over j = m, m - k, m - 2k, ...;  X_{m+1} = Y_m + attention + MLP of layer m.

    X_j are layer outputs that contain their input (X_0 the embedding). The final read is Y of the last layer.
    `dilation`: k, the step between outputs that are summed.
    `period`: only every layer of this number sums, and the others read X_m.
    `backend`: the sums run as in `headwater.depth_attention`.
    At initialisation: a is one on the newest output and zero elsewhere, so it is the plain residual exactly.
    Cost: about D(D + 3) / (2 k p) scalars for D layers; the state holds the layer outputs that a later sum reads.
    DenseFormer, arXiv 2402.02622.
    """

    at_start = "exact"

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        dilation: int = 1,
        period: int = 1,
        backend: Backend = "auto",
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers, kinds, backend)
        for name, value in (("dilation", dilation), ("period", period)):
            if not 1 <= value <= self.layers:
                raise ValueError(
                    f"{name} counts layers and must lie between 1 and {self.layers}, got {value}"
                )
        self.dilation, self.period = dilation, period
        summed = {
            m: range(m % dilation, m + 1, dilation) for m in range(period, self.layers + 1, period)
        }
        if self.layers in summed and len(summed[self.layers]) == 1:
            del summed[self.layers]  # a gain on all that the final norm sees would have no effect
        self.kept = tuple(_kept(m, summed) for m in range(self.layers + 1))
        self.chosen = {
            m: tuple(self.kept[m].index(j) for j in sources) for m, sources in summed.items()
        }
        self.sums = nn.ParameterDict(
            {
                self.key(m): nn.Parameter(torch.eye(len(sources))[-1].clone())
                for m, sources in summed.items()
            }
        )

    def bank_size(self, m: int) -> int:
        return len(self.kept[m])

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if m not in self.chosen:
            return bank[-1], bank[-1], bank
        chosen, weights, thread = (
            self.chosen[m],
            self.sums[self.key(m)].unsqueeze(0),
            m < max(self.chosen),
        )
        (x,), threaded = mix_bank(
            [bank[n] for n in chosen], weights, thread=thread, backend=self._now()
        )
        outputs = {**dict(enumerate(bank)), **dict(zip(chosen, threaded))}
        return x, x, tuple(outputs.values())

    def store(self, bank: State, output: Tensor, m: int) -> State:
        outputs = {**dict(zip(self.kept[m], bank, strict=True)), m + 1: output}
        return tuple(outputs[j] for j in self.kept[m + 1])

    def bank_weights(self, bank: State, m: int) -> Tensor:
        weights = torch.zeros(len(bank), device=bank[0].device)
        if m in self.chosen:
            weights[list(self.chosen[m])] = self.sums[self.key(m)].detach().float()
        else:
            weights[-1] = 1
        return spread(weights, bank[0])

    def flops_per_token(self) -> int:
        return (
            2 * self.dim * (self.sublayers + sum(weights.numel() for weights in self.sums.values()))
        )


def _kept(m: int, summed: dict[int, range]) -> tuple[int, ...]:
    """The layer outputs that the sum at m or a later one reads, and the newest."""
    return tuple(
        j
        for j in range(m + 1)
        if j == m or any(j in summed[later] for later in summed if later >= m)
    )
