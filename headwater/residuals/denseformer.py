"""DenseFormer: between layers, a learned weighted sum over the outputs of all earlier layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwater.ops.banks import mix_bank
from headwater.ops.routing import Backend

from .base import State
from .layerwise import LayerwiseResidual, spread
from .options import check_range
from .registry import register


@register("denseformer")
class DenseFormerResidual(LayerwiseResidual):
    """Y_m = sum_j a_{mj} X_j over j = m, m - k, m - 2k, ...;  X_{m+1} = Y_m + attention + MLP of layer m.

    X_j are layer outputs that contain their input (X_0 the embedding). The final read is Y of the
    last layer.
    `dilation`: k, the step between outputs that are summed.
    `period`: only every layer of this number sums, and the others read X_m.
    `backend`: the sums run as in `headwater.depth_attention`.
    At initialisation: a is one on the newest output and zero elsewhere, so it is the plain residual
    exactly.
    Cost: about D(D + 3) / (2 k p) scalars for D layers; the state holds the layer outputs that a
    later sum reads. DenseFormer, arXiv 2402.02622.
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
        check_range("dilation", dilation, 1, self.layers)
        check_range("period", period, 1, self.layers)
        # The layer outputs that the sum at m reads.
        summed = {}
        for m in range(period, self.layers + 1, period):
            summed[m] = range(m % dilation, m + 1, dilation)
        # A gain on all that the final norm sees would have no effect.
        if self.layers in summed and len(summed[self.layers]) == 1:
            del summed[self.layers]
        self.kept_outputs = tuple(_kept(m, summed) for m in range(self.layers + 1))
        # Their places in the bank.
        self.places: dict[int, tuple[int, ...]] = {}
        newest = {}
        for m, outputs in summed.items():
            self.places[m] = tuple(map(self.kept_outputs[m].index, outputs))
            newest[self.key(m)] = torch.eye(len(outputs))[-1].clone()
        self.sums = nn.ParameterDict(newest)

    def bank_size(self, m: int) -> int:
        return len(self.kept_outputs[m])

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if m not in self.places:
            return bank[-1], bank[-1], bank
        outputs = list(bank)
        sources = [outputs[place] for place in self.places[m]]
        weights = self.sums[self.key(m)].unsqueeze(0)
        # Later sums read the sources as this sum hands them on, with their gradients threaded.
        thread = m < max(self.places)
        (x,), threaded = mix_bank(sources, weights, thread=thread, backend=self._now())
        for place, source in zip(self.places[m], threaded):
            outputs[place] = source
        return x, x, tuple(outputs)

    def store(self, bank: State, output: Tensor, m: int) -> State:
        outputs = dict(zip(self.kept_outputs[m], bank, strict=True))
        outputs[m + 1] = output
        return tuple(outputs[j] for j in self.kept_outputs[m + 1])

    def bank_weights(self, bank: State, m: int) -> Tensor:
        # Outputs that the sum leaves out weigh nothing.
        weights = torch.zeros(len(bank), device=bank[0].device)
        if m in self.places:
            shares = self.sums[self.key(m)].detach()
            weights[list(self.places[m])] = shares.float()
        else:
            weights[-1] = 1
        return spread(weights, bank[0])

    def flops_per_token(self) -> int:
        weights = sum(weights.numel() for weights in self.sums.values())
        return 2 * self.dim * (self.sublayers + weights)


def _kept(m: int, summed: dict[int, range]) -> tuple[int, ...]:
    """Return the layer outputs up to m that the sum at m or a later one reads, and the newest."""
    outputs = {m}
    for later, sources in summed.items():
        if later >= m:
            outputs.update(j for j in sources if j <= m)
    return tuple(sorted(outputs))
