"""Residuals whose unit is a whole layer: each layer mixes the outputs of earlier layers; inside it, outputs add up."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.routing import Backend

from .base import Layout, Next, Norm, Read, Residual, State, apply_norm, weights_held

CHANNEL_MIXERS = ("mlp", "moe")
INPUTS = ("attention",)  # sublayers that take separate query, key and value inputs
LEADS = ("shortswa",)  # sublayers that mix a layer's input before the layer's attention sees it
KINDS = (*INPUTS, "kda", "mla", "mixer", *LEADS, *CHANNEL_MIXERS)

ALL_KINDS = (
    *KINDS,
    "parallel",
)  # attention and MLP on one read, for residuals that treat all sublayers alike


def sublayer_kinds(
    sublayers: int, kinds: Sequence[str] | None, known: tuple[str, ...] = KINDS
) -> tuple[str, ...]:
    """The given kinds, or attention and MLP in turn."""
    if kinds is None:
        return tuple("mlp" if i % 2 else "attention" for i in range(sublayers))
    if len(kinds) != sublayers:
        raise ValueError(
            f"kinds must name each of the {sublayers} sublayers, got {len(kinds)} names"
        )
    if unknown := sorted(
        {*kinds} - {*known}
    ):  # an "ffn" would pass for a mixer of tokens, and no layer would end
        raise ValueError(
            f"kinds are {', '.join(known)}; got '{unknown[0]}'. A layer ends with its {' or '.join(CHANNEL_MIXERS)}; "
            "what mixes tokens in a way of its own is a mixer"
        )
    return tuple(kinds)


def layer_starts(kinds: Sequence[str]) -> tuple[int, ...]:
    """Index of each layer's first sublayer: a layer begins where tokens are mixed after channels were."""
    return tuple(
        i
        for i, kind in enumerate(kinds)
        if i == 0 or (kinds[i - 1] in CHANNEL_MIXERS and kind not in CHANNEL_MIXERS)
    )


class LayerwiseResidual(Residual):
    """State between layers: a bank of layer outputs, newest last. Inside a layer: what it carries, then the bank.

    A subclass says what layer m reads from the bank (`mix`) and what the bank keeps (`store`). `keeps_input`: a
    layer's output contains its input (the stream is carried); otherwise the input and the sum of outputs are carried
    apart, and `rereads_input` says whether later sublayers of the layer see the input too. `backend`, of those that mix
    the bank by kernels, as in `headwater.depth_attention`.

    A short attention before the layer's own is a lead: its output joins what the layer has read, S = H + ShortSWA(H)
    as its paper has it (arXiv 2603.16039). It reads what the layer carries; query, key and value inputs that a layer
    routes apart wait for the attention, and the lead's output joins each of them.
    """

    keeps_input: bool = True
    rereads_input: bool = True

    def __init__(
        self, dim: int, sublayers: int, kinds: Sequence[str] | None, backend: Backend = "reference"
    ) -> None:
        super().__init__(dim, sublayers)
        self.backend: Backend = backend
        self.fused = backend != "reference"
        self.kinds = sublayer_kinds(sublayers, kinds)
        self.starts = layer_starts(self.kinds)
        self.layers = len(self.starts)
        self.boundaries = {
            i: m for m, i in enumerate((*self.starts, sublayers))
        }  # sublayer index to layer number
        self.layer_ends = tuple(i - 1 for i in (*self.starts[1:], sublayers))
        # The sublayer of each layer that takes what `mix` returns: its first, or the first behind its leads.
        self.openers = tuple(map(self._opener, self.starts, self.layer_ends))
        self.leads = frozenset(
            i for s, o in zip(self.starts, self.openers, strict=True) for i in range(s, o)
        )

    def _opener(self, start: int, end: int) -> int:
        return next((i for i in range(start, end) if self.kinds[i] not in LEADS), end)

    @abstractmethod
    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        """What the first sublayer of layer m sees, the input the layer carries on, and the bank that later layers read.
        m == layers: the final read."""

    @abstractmethod
    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Depth weights of `mix` over the bank, (N, ..., H)."""

    def store(self, bank: State, output: Tensor, m: int) -> State:
        """The bank after layer m."""
        return (*bank, output)

    def _now(self) -> Backend:
        return "reference" if weights_held() else self.backend

    def key(self, m: int) -> str:
        """Name of the parameters of `mix(bank, m)`: the sublayer that reads it."""
        return str((*self.starts, self.sublayers)[m])

    def takes_inputs(self, m: int) -> bool:
        """Whether layer m has a sublayer that takes query, key and value apart, first or behind its leads."""
        return m < self.layers and self.kinds[self.openers[m]] in INPUTS

    def routes(self, m: int) -> bool:
        """Whether `mix(bank, m)` makes query, key and value inputs."""
        return False

    def waiting(self, m: int) -> int:
        """Inputs of layer m that wait, while its leads run, for the attention behind them."""
        return 3 if self.openers[m] != self.starts[m] and self.routes(m) else 0

    def bank_size(self, m: int) -> int:
        """Tensors in the bank before layer m: by default the embedding and every layer's output."""
        return m + 1

    def layout(self, i: int) -> Layout:
        return self.layouts_at("read", i)[0]

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        layer = sum(start <= i for start in self.starts) - 1
        if verb == "read" and i in self.boundaries:
            return (self._bank(self.boundaries[i]),)
        carried: Layout = (
            ("carried",) if self.keeps_input or i <= self.openers[layer] else ("input", "outputs")
        )
        if i in self.leads or (verb == "read" and i == self.openers[layer]):
            carried += ("query", "key", "value")[: self.waiting(layer)]
        return ((*carried, *self._bank(layer)),)

    def _bank(self, m: int) -> Layout:
        return tuple(f"bank {n}" for n in range(self.bank_size(m)))

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        if i in self.boundaries:
            x, carried, bank = self.mix(state, self.boundaries[i])
            if i in self.leads:
                waiting = x if isinstance(x, tuple) else ()
                return apply_norm(norm, carried), (carried, *waiting, *bank)
            return apply_norm(norm, x), (carried, *bank)
        if i in self.openers:
            return self._open(state, self.openers.index(i), norm)
        if i in self.leads or self.keeps_input:
            return apply_norm(norm, state[0]), state
        return apply_norm(norm, state[0] + state[1] if self.rereads_input else state[1]), state

    def _open(self, state: State, m: int, norm: Norm | None) -> tuple[Read, State]:
        """The attention of layer m behind its leads."""
        if not self.waiting(m):
            return apply_norm(norm, state[0]), state
        carried, query, key, value, *bank = state
        return apply_norm(norm, (query, key, value)), (carried, *bank)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        if i in self.leads:
            inputs = 1 + self.waiting(sum(start <= i for start in self.starts) - 1)
            return (*(x + y for x in state[:inputs]), *state[inputs:])
        first = i in self.openers
        carried, bank = (
            (state[:1], state[1:]) if first or self.keeps_input else (state[:2], state[2:])
        )
        if self.keeps_input:
            carried = (carried[0] + y,)
        else:
            carried = (carried[0], y.to(carried[0].dtype) if first else carried[1] + y)
        if i not in self.layer_ends:
            return (*carried, *bank)
        return self.store(bank, carried[-1], self.layer_ends.index(i))

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, self.mix(state, self.layers)[1])

    def _weights(self, state: State, i: int) -> Tensor:
        if i in self.boundaries:
            return self.bank_weights(state, self.boundaries[i])
        one = self.keeps_input or not self.rereads_input or i in self.leads or i in self.openers
        carried = 1 if one else 2
        return torch.ones(carried, *state[0].shape[:-1], 1, device=state[0].device)


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Static weights (N,) as (N, ..., 1) over the tokens of `like`."""
    return weights.detach().view(-1, *[1] * like.dim()).expand(-1, *like.shape[:-1], 1)
