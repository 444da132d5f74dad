"""LAuReL: learned weights, and a low-rank map of the stream, beside the plain residual."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Layout, State
from .numerics import combine, project
from .options import check_range
from .registry import register
from .standard import StreamResidual


class LowRank(nn.Module):
    """The maps of x to up @ down @ x, and the weights of the states that x sums."""

    def __init__(self, dim: int, rank: int, states: int) -> None:
        super().__init__()
        # The paper's start: each rank reads its share of the channels.
        rows, columns = torch.arange(rank).unsqueeze(1), torch.arange(dim)
        self.down = nn.Parameter((columns % rank == rows) / (rank * dim) ** 0.5)  # (rank, D)
        self.up = nn.Parameter(torch.zeros(dim, rank))
        self.mix = nn.Parameter(torch.ones(states)) if states > 1 else None


class Balance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))


@register("laurel")
class LaurelResidual(StreamResidual):
    """h_{i+1} = a_i f_i(h_i) + b_i h_i + B_i A_i sum_{j<k} c_{ij} h_{i-j}.

    `form`: low-rank has a = b = 1 and k = 1, previous has a = b = 1 and sums the last k states,
        weighted has no low-rank map and (a, b) = 2 softmax(logits), and weighted-low-rank has both.
    `rank`: r, the rank of B (D x r) and A (r x D), by default 32 at most.
    `states`: k, the number of states that form=previous sums.
    At initialisation: B is zero and the logits are equal, so it is the plain residual. The paper's
    weighted form has no factor two, which makes every step halve the stream; with it, equal logits
    are weights of one.
    Cost: 2 r D parameters per sublayer; previous stores k states. LAuReL, arXiv 2411.07501.
    """

    at_start = "exact"

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        form: Literal["low-rank", "previous", "weighted", "weighted-low-rank"] = "low-rank",
        rank: int | None = None,
        states: int = 3,
    ) -> None:
        super().__init__(dim, sublayers)
        rank = min(32, dim) if rank is None else rank
        check_range("rank", rank, 1, dim)
        if form == "previous":
            check_range("states", states, 2, sublayers)
        self.rank = rank
        self.states = states if form == "previous" else 1
        self.mixes = "scalar" if form == "weighted" else "operator"
        self.balance = nn.ModuleDict()
        self.low_rank = nn.ModuleDict()
        for i in range(sublayers):
            if form.startswith("weighted"):
                self.balance[str(i)] = Balance()
            if form != "weighted":
                states = min(i + 1, self.states)
                self.low_rank[str(i)] = LowRank(dim, rank, states)

    def layout(self, i: int) -> Layout:
        states = min(i + 1, self.states)
        return ("stream", *(f"state {back} before" for back in range(1, states)))

    def _write(self, state: State, i: int, y: Tensor) -> State:
        h = state[0]
        if self.balance:
            balance = cast(Balance, self.balance[self.keys[i]])
            a, b = (2 * balance.logits.softmax(0)).split(1)
            new = combine((h, y), (b, a))
        else:
            new = h + y
        if self.low_rank:
            low = cast(LowRank, self.low_rank[self.keys[i]])
            x = h if low.mix is None else combine(state, low.mix.split(1))
            mapped = project(project(x, low.down), low.up)
            new = (new + mapped).to(h.dtype)
        # The newest state first; the oldest goes.
        return (new, *state[: self.states - 1])

    def flops_per_token(self) -> int:
        # Two products with a low-rank map, and a sum over states.
        maps = 4 * self.rank * self.dim * len(self.low_rank)
        return maps + 2 * self.dim * self.sublayers * (1 + self.states)
