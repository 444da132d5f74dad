"""Residuals whose unit is a whole layer: each layer mixes the outputs of earlier layers; inside it, outputs add up."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Layout, Next, Norm, Read, Residual, State, apply_norm

CHANNEL_MIXERS = ("mlp", "moe")
INPUTS = ("attention", "shortswa")  # sublayers that take separate query, key and value inputs


def sublayer_kinds(sublayers: int, kinds: Sequence[str] | None) -> tuple[str, ...]:
    """The given kinds, or attention and MLP in turn."""
    if kinds is None:
        return tuple("mlp" if i % 2 else "attention" for i in range(sublayers))
    if len(kinds) != sublayers:
        raise ValueError(f"kinds must name each of the {sublayers} sublayers, got {len(kinds)} names")
    return tuple(kinds)


def layer_starts(kinds: Sequence[str]) -> tuple[int, ...]:
    """Index of each layer's first sublayer: a layer begins where tokens are mixed after channels were."""
    return tuple(
        i for i, kind in enumerate(kinds) if i == 0 or (kinds[i - 1] in CHANNEL_MIXERS and kind not in CHANNEL_MIXERS)
    )


class LayerwiseResidual(Residual):
    """State between layers: a bank of layer outputs, newest last. Inside a layer: what it carries, then the bank.

    A subclass says what layer m reads from the bank (`mix`) and what the bank keeps (`store`). `keeps_input`: a
    layer's output contains its input (the stream is carried); otherwise the input and the sum of outputs are carried
    apart, and `rereads_input` says whether later sublayers of the layer see the input too.
    """

    keeps_input: bool = True
    rereads_input: bool = True

    def __init__(self, dim: int, sublayers: int, kinds: Sequence[str] | None) -> None:
        super().__init__(dim, sublayers)
        self.kinds = sublayer_kinds(sublayers, kinds)
        self.starts = layer_starts(self.kinds)
        self.layers = len(self.starts)
        self.boundaries = {i: m for m, i in enumerate((*self.starts, sublayers))}  # sublayer index to layer number
        self.layer_ends = tuple(i - 1 for i in (*self.starts[1:], sublayers))

    @abstractmethod
    def mix(self, bank: State, m: int) -> tuple[Read, Tensor]:
        """What the first sublayer of layer m sees, and the input the layer carries on. m == layers: the final read."""

    @abstractmethod
    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Depth weights of `mix` over the bank, (N, ..., H)."""

    def store(self, bank: State, output: Tensor, m: int) -> State:
        """The bank after layer m."""
        return (*bank, output)

    def key(self, m: int) -> str:
        """Name of the parameters of `mix(bank, m)`: the sublayer that reads it."""
        return str((*self.starts, self.sublayers)[m])

    def takes_inputs(self, m: int) -> bool:
        """Whether layer m begins with a sublayer that takes query, key and value apart."""
        return m < self.layers and self.kinds[self.starts[m]] in INPUTS

    def bank_size(self, m: int) -> int:
        """Tensors in the bank before layer m: by default the embedding and every layer's output."""
        return m + 1

    def layout(self, i: int) -> Layout:
        return self.layouts_at("read", i)[0]

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        layer = sum(start <= i for start in self.starts) - 1
        if verb == "read" and i in self.boundaries:
            return (self._bank(self.boundaries[i]),)
        carried = ("carried",) if self.keeps_input or i in self.boundaries else ("input", "outputs")
        return ((*carried, *self._bank(layer)),)

    def _bank(self, m: int) -> Layout:
        return tuple(f"bank {n}" for n in range(self.bank_size(m)))

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        if i in self.boundaries:
            x, carried = self.mix(state, self.boundaries[i])
            return apply_norm(norm, x), (carried, *state)
        if self.keeps_input:
            return apply_norm(norm, state[0]), state
        return apply_norm(norm, state[0] + state[1] if self.rereads_input else state[1]), state

    def _write(self, state: State, i: int, y: Tensor) -> State:
        first = i in self.boundaries
        carried, bank = (state[:1], state[1:]) if first or self.keeps_input else (state[:2], state[2:])
        if self.keeps_input:
            carried = (carried[0] + y,)
        else:
            carried = (carried[0], y if first else carried[1] + y)
        if i not in self.layer_ends:
            return (*carried, *bank)
        return self.store(bank, carried[-1], self.layer_ends.index(i))

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, self.mix(state, self.layers)[1])

    def _weights(self, state: State, i: int) -> Tensor:
        if i in self.boundaries:
            return self.bank_weights(state, self.boundaries[i])
        carried = 1 if self.keeps_input or not self.rereads_input else 2
        return torch.ones(carried, *state[0].shape[:-1], 1, device=state[0].device)


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Static weights (N,) as (N, ..., 1) over the tokens of `like`."""
    return weights.detach().view(-1, *[1] * like.dim()).expand(-1, *like.shape[:-1], 1)
