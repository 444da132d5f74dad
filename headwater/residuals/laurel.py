"""LAuReL: learned weights, and a low-rank map of the stream, beside the plain residual."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Layout, State
from .numerics import combine, project
from .registry import register
from .standard import StreamResidual


class LowRank(nn.Module):
    """x to up @ down @ x, and the weights of the states that x sums."""

    def __init__(self, dim: int, rank: int, states: int) -> None:
        super().__init__()
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

    `form`: low-rank has a = b = 1 and k = 1, previous has a = b = 1 and sums the last k states, weighted has no
        low-rank map and (a, b) = 2 softmax(logits), and weighted-low-rank has both.
    `rank`: r, the rank of B (D x r) and A (r x D), by default 32 at most.
    `states`: k, the number of states that form=previous sums.
    At initialisation: B is zero and the logits are equal, so it is the plain residual. The paper's weighted form has
    no factor two, which makes every step halve the stream; with it, equal logits are weights of one.
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
        if not 1 <= rank <= dim:
            raise ValueError(f"rank must lie between 1 and the width {dim}, got {rank}")
        if form == "previous" and not 2 <= states <= sublayers:
            raise ValueError(
                f"states must lie between 2 and the {sublayers} sublayers, got {states}"
            )
        self.rank = rank
        self.states = states if form == "previous" else 1
        self.mixes = "scalar" if form == "weighted" else "operator"
        weighted, low_rank = form.startswith("weighted"), form != "weighted"
        self.balance = nn.ModuleDict(
            {str(i): Balance() for i in range(sublayers)} if weighted else {}
        )
        self.low_rank = nn.ModuleDict(
            {str(i): LowRank(dim, rank, min(i + 1, self.states)) for i in range(sublayers)}
            if low_rank
            else {}
        )

    def layout(self, i: int) -> Layout:
        return ("stream", *(f"state {back} before" for back in range(1, min(i + 1, self.states))))

    def _write(self, state: State, i: int, y: Tensor) -> State:
        h = state[0]
        if self.balance:
            a, b = (2 * cast(Balance, self.balance[self.keys[i]]).logits.softmax(0)).split(1)
            new = combine((h, y), (b, a))
        else:
            new = h + y
        if self.low_rank:
            low = cast(LowRank, self.low_rank[self.keys[i]])
            x = h if low.mix is None else combine(state, low.mix.split(1))
            new = (new + project(project(x, low.down), low.up)).to(h.dtype)
        return (new, *state[: self.states - 1])

    def flops_per_token(self) -> int:
        maps = 4 * self.rank * self.dim * len(self.low_rank)
        return maps + 2 * self.dim * self.sublayers * (1 + self.states)
