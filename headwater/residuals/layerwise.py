"""Residuals whose unit is a whole layer: each layer mixes the outputs of earlier layers, and inside
it outputs add up."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from headwater.ops.routing import Backend

from .base import Layout, Next, Norm, Read, Residual, State, apply_norm, even_weights, weights_held

CHANNEL_MIXERS = ("mlp", "moe")
# Sublayers that take separate query, key and value inputs.
INPUTS = ("attention",)
# Sublayers that mix a layer's input before the layer's attention sees it.
LEADS = ("shortswa",)
KINDS = (*INPUTS, "kda", "mla", "mixer", *LEADS, *CHANNEL_MIXERS)

# "parallel" is attention and MLP on one read, for residuals that treat all sublayers alike.
ALL_KINDS = (*KINDS, "parallel")


def sublayer_kinds(
    sublayers: int, kinds: Sequence[str] | None, known: tuple[str, ...] = KINDS
) -> tuple[str, ...]:
    """Return the kinds if they are valid, by default attention and MLP in turn."""
    if kinds is None:
        return tuple("mlp" if i % 2 else "attention" for i in range(sublayers))
    if len(kinds) != sublayers:
        raise ValueError(
            f"kinds must name each of the {sublayers} sublayers, got {len(kinds)} names"
        )
    # An "ffn" would pass for a mixer of tokens, and no layer would end.
    for kind in kinds:
        if kind not in known:
            raise ValueError(
                f"kinds are {', '.join(known)}; got '{kind}'. A layer ends with its "
                f"{' or '.join(CHANNEL_MIXERS)}; what mixes tokens in a way of its own is a mixer"
            )
    return tuple(kinds)


def layer_starts(kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the index of each layer's first sublayer: a layer begins where tokens are mixed after
    channels were."""
    starts = [0]
    # Channels were mixed by the sublayer before, and are not by this one.
    for i in range(1, len(kinds)):
        if kinds[i - 1] in CHANNEL_MIXERS and kinds[i] not in CHANNEL_MIXERS:
            starts.append(i)
    return tuple(starts)


class LayerwiseResidual(Residual):
    """State between layers: a bank of layer outputs, newest last. Inside a layer: what it carries,
    then the bank.

    A subclass says what layer m reads from the bank (`mix`) and what the bank keeps (`store`).
    `keeps_input`: a layer's output contains its input (the stream is carried); otherwise the input
    and the sum of outputs are carried apart, and `rereads_input` says whether later sublayers of
    the layer see the input too. `backend`, of those that mix the bank by kernels, as in
    `headwater.depth_attention`.

    A short attention before the layer's own is a lead: its output joins what the layer has read,
    S = H + ShortSWA(H) as its paper has it (arXiv 2603.16039). It reads what the layer carries;
    query, key and value inputs that a layer routes apart wait for the attention, and the lead's
    output joins each of them.
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
        stops = (*self.starts[1:], sublayers)
        # Each layer's first sublayer, and the final read, to the number of the layer.
        self.boundaries = {i: m for m, i in enumerate((*self.starts, sublayers))}
        self.layer_ends = tuple(stop - 1 for stop in stops)
        # The sublayer of each layer that takes what `mix` returns: its first, or the first behind
        # its leads.
        self.openers = tuple(map(self._opener, self.starts, self.layer_ends))
        self.leads: set[int] = set()
        for start, opener in zip(self.starts, self.openers):
            self.leads.update(range(start, opener))

    def _opener(self, start: int, end: int) -> int:
        for i in range(start, end):
            if self.kinds[i] not in LEADS:
                return i
        return end

    @abstractmethod
    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        """Mix the bank for layer m; m == layers is the final read.

        Returns what the first sublayer of the layer sees, the input that the layer carries on, and
        the bank that later layers read.
        """

    @abstractmethod
    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Return the depth weights of `mix` over the bank, (N, ..., H)."""

    def store(self, bank: State, output: Tensor, m: int) -> State:
        """Return the bank after layer m."""
        return (*bank, output)

    def _now(self) -> Backend:
        return "reference" if weights_held() else self.backend

    def key(self, m: int) -> str:
        """Name the parameters of `mix(bank, m)` after the sublayer that reads it."""
        return str((*self.starts, self.sublayers)[m])

    def takes_inputs(self, m: int) -> bool:
        """Return whether layer m begins, behind its leads, with a sublayer that takes query, key
        and value apart."""
        return m < self.layers and self.kinds[self.openers[m]] in INPUTS

    def routes(self, m: int) -> bool:
        """Return whether `mix(bank, m)` makes query, key and value inputs."""
        return False

    def waiting(self, m: int) -> int:
        """Count the inputs of layer m that wait, while its leads run, for the attention behind."""
        has_leads = self.openers[m] != self.starts[m]
        return 3 if has_leads and self.routes(m) else 0

    def bank_size(self, m: int) -> int:
        """Count the tensors in the bank before layer m: the embedding and every layer's output,
        unless a subclass keeps fewer."""
        return m + 1

    def layout(self, i: int) -> Layout:
        return self.layouts_at("read", i)[0]

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        if verb == "read" and i in self.boundaries:
            return (self._bank(self.boundaries[i]),)
        layer = self._layer_of(i)
        carried: Layout = ("carried",)
        if not self.keeps_input and i > self.openers[layer]:
            carried = ("input", "outputs")
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
            if i not in self.leads:
                return apply_norm(norm, x), (carried, *bank)
            # The layer begins with a lead: inputs that are routed apart wait for the attention.
            waiting = x if isinstance(x, tuple) else ()
            return apply_norm(norm, carried), (carried, *waiting, *bank)
        # The attention behind the leads takes the inputs that wait.
        if i in self.openers and self.waiting(self._layer_of(i)):
            carried, query, key, value, *others = state
            return apply_norm(norm, (query, key, value)), (carried, *others)
        if i in self.openers or i in self.leads or self.keeps_input:
            return apply_norm(norm, state[0]), state
        x = state[0] + state[1] if self.rereads_input else state[1]
        return apply_norm(norm, x), state

    def _write(self, state: State, i: int, y: Tensor) -> State:
        # What a lead writes joins every input of the layer.
        if i in self.leads:
            inputs = 1 + self.waiting(self._layer_of(i))
            return (*(x + y for x in state[:inputs]), *state[inputs:])
        carried: State
        if self.keeps_input:
            carried, bank = (state[0] + y,), state[1:]
        elif i in self.openers:
            y = y.to(state[0].dtype)
            carried, bank = (state[0], y), state[1:]
        else:
            carried, bank = (state[0], state[1] + y), state[2:]
        # The end of a layer is an output of it.
        if i not in self.layer_ends:
            return (*carried, *bank)
        return self.store(bank, carried[-1], self._layer_of(i))

    def _layer_of(self, i: int) -> int:
        """Return the layer of sublayer `i`, or the last one for the final read."""
        return sum(start <= i for start in self.starts) - 1

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, self.mix(state, self.layers)[1])

    def _weights(self, state: State, i: int) -> Tensor:
        if i in self.boundaries:
            # A layer's first read is a mixture of the bank.
            return self.bank_weights(state, self.boundaries[i])
        # Inside a layer the read is what the layer carries, or the sum of input and outputs.
        one = self.keeps_input or not self.rereads_input or i in self.leads or i in self.openers
        return even_weights(state[0], 1 if one else 2)


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Spread static weights (N,) over the tokens of `like`, (N, ..., 1)."""
    weights = weights.detach()
    while weights.dim() <= like.dim():
        weights = weights.unsqueeze(-1)
    return weights.expand(-1, *like.shape[:-1], 1)
