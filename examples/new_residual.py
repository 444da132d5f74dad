"""A residual of your own, in a file of your own: a learned skip from the embedding to every read.

python examples/new_residual.py        # what it costs, and how it starts
cd examples; headwater residuals --check embedding-skip --plugin new_residual
cd examples; headwater compare --plugin new_residual --size nano --residuals standard embedding-skip
"""

import torch
from torch import Tensor, nn

from headwater.residuals import Layout, Norm, Residual, State, apply_norm, register


@register("embedding-skip")
class EmbeddingSkipResidual(Residual):
    """x_i = h_i + a_i e;  h_{i+1} = h_i + f_i(x_i): every later read also sees the embedding e.

    `start`: a_i at the start. At initialisation: zero, the plain residual. Cost: one parameter a read; the state
    holds 2 D.
    """

    def __init__(self, dim: int, sublayers: int, *, start: float = 0.0) -> None:
        super().__init__(dim, sublayers)
        self.at_start = "exact" if start == 0 else "different"
        # One parameter a read, so that a pipeline can divide them; the last is the output head's.
        gains = {str(i): nn.Parameter(torch.full((1,), start)) for i in range(1, sublayers + 1)}
        self.gains = nn.ParameterDict(gains)

    # The names of the tensors in a state before read i; a caller's state is checked against them.
    def layout(self, i: int) -> Layout:
        return ("stream", "embedding")

    def _begin(self, x: Tensor) -> State:
        return (x, x)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        h, e = state
        x = torch.addcmul(h, e, self.gains[str(i)].to(h.dtype)) if i else h
        return apply_norm(norm, x), state

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y, state[1])

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return self._read(state, self.sublayers, norm)[0]

    # The weight of each tensor in the state: (tensors, ..., heads).
    def _weights(self, state: State, i: int) -> Tensor:
        ones = torch.ones(*state[0].shape[:-1], 1, device=state[0].device)
        return torch.stack((ones, ones * (self.gains[str(i)] if i else 0)))


if __name__ == "__main__":
    from headwater.analyze.table import print_table, residual_table

    print_table(residual_table(["standard", "embedding-skip", "embedding-skip:start=0.5"]))
