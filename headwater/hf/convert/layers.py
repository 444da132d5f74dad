"""A decoder layer whose residual is swapped, inside the model's own loop.

The loop of every model in transformers treats what passes between layers as one opaque value:

    for layer in self.layers:
        hidden_states = layer(hidden_states, attention_mask=..., position_embeddings=..., ...)
    hidden_states = self.norm(hidden_states)

So the first converted layer begins the residual's state, layers hand a `DepthState` to each other, and the final norm
makes the final read. Masks, positions and caches stay the model's business; no loop is written again. The instance's
class is replaced by a subclass made for it (`__call__` is looked up on the class), and nothing else is touched.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwater.residuals import Read, State

from .arguments import Takes, cache_of
from .depth import Depth, DepthState, watch
from .devices import before_hop
from .layouts import Layout
from .remake import remakable


@dataclass(frozen=True)
class Site:
    """One sublayer of a layer, by the names of its modules. `sublayer` is its index in the whole network."""

    sublayer: int
    kind: str  # attention, mlp, parallel: both, or mixer: the only one of its layer
    norm: str | None
    body: str
    out: tuple[str, ...]
    beside: tuple[str, ...] = ()  # more bodies on the same input
    second: "Site | None" = None  # the MLP of a parallel layer
    output: tuple[str, ...] = ()  # after the sum of all bodies
    # Norms of the query, key and value inputs, each with the body's argument
    separate: tuple[tuple[str, str], ...] = ()
    before: str | None = None  # adds to all streams of the residual, before they are read

    @property
    def parts(self) -> tuple["Site", ...]:
        return (self,) if self.second is None else (self, self.second)

    @property
    def bodies(self) -> tuple[str, ...]:
        """Names of the modules that are called after a norm."""
        names = [] if self.before is None else [self.before]
        for part in self.parts:
            names += [part.body, *part.out, *part.beside]
        return (*names, *self.output)

    @property
    def names(self) -> set[str]:
        norms = {part.norm for part in self.parts if part.norm is not None}
        return norms | {norm for norm, _ in self.separate} | {*self.bodies}


def sites_of(layer: nn.Module, layout: Layout, first: int) -> tuple[Site, ...]:
    """The sublayers of a layer; `first` is the index of the first."""
    # Some residuals treat attention and MLP differently, and cannot take a layer of one sublayer.
    kind = layout.kind if layout.mlp else "mixer"
    body = present(layer, layout.attention)
    attention = Site(first, kind, layout.attention_norm, body, layout.attention_out)
    attention = replace(attention, output=layout.output, separate=layout.separate)
    if layout.before is not None and isinstance(part_of(layer, layout.before), nn.Module):
        attention = replace(attention, before=layout.before)
    # A layer of one sublayer, such as Mamba's.
    if not layout.mlp:
        return (attention,)
    body = present(layer, layout.mlp)
    beside = [name for name in layout.mlp_beside if name != body]
    beside = [name for name in beside if isinstance(part_of(layer, name), nn.Module)]
    mlp = Site(first, "mlp", layout.mlp_norm, body, layout.mlp_out, tuple(beside))
    # A model may say by an attribute whether its branches run side by side.
    parallel = layout.parallel
    if isinstance(parallel, str):
        parallel = getattr(layer, parallel)
    if parallel:
        mlp = replace(mlp, norm=layout.parallel_norm)
        return (replace(attention, kind="parallel", second=mlp),)
    return attention, replace(mlp, sublayer=first + 1, output=layout.output)


def present(layer: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if isinstance(part_of(layer, name), nn.Module):
            return name
    raise LookupError(f"it has none of the modules {', '.join(names)}")


def part_of(layer: nn.Module, path: str) -> Any:
    """A part by its name, or by names with dots between them; None where there is none."""
    part: Any = layer
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


class ConvertedLayer(nn.Module):
    """Mixed in before a decoder layer's own class; what the conversion put on the instance is in `_depth_*`."""

    _depth: Depth
    _depth_sites: tuple[Site, ...]
    # Names of the layer's positional arguments after the hidden state
    _depth_arguments: tuple[str, ...]
    _depth_multiplier: str | None
    # By the name of a module, which of the layer's arguments it gets
    _depth_takes: Mapping[str, Takes]
    # Which of attention's results are returned beside the hidden state
    _depth_returns: tuple[int | None, ...]
    _depth_fp32: bool  # whether the stream is kept in fp32, beside modules of half precision

    def __call__(self, hidden_states: DepthState | Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(self._depth_arguments, args, strict=False))
        state = hidden_states
        if not isinstance(state, DepthState):
            state = self._begin(state, kwargs)
        # The state goes in and out as flat positional tensors: re-entrant checkpointing sees gradients of nothing else.
        # What is wanted goes along: a recomputation in the backward pass must do what the forward pass did.
        sites = self._depth_sites
        tensors = before_hop(self, self._depth.residual, state.tensors, sites[0].sublayer)
        watched = state.record is not None
        flat = super().__call__(*tensors, _depth_watched=watched, **kwargs)
        # Behind the state come the read and the weights that were watched, then what attention returned.
        flat, returned = _cut(flat, len(self._depth_returns))
        weights: State = ()
        reads: State = ()
        if watched:
            flat, weights = _cut(flat, len(sites))
            flat, reads = _cut(flat, 1)
        after = state.after(flat, sites[-1].sublayer + 1, weights, reads)
        return (after, *returned) if returned else after

    def forward(
        self, *tensors: Tensor, _depth_watched: bool = False, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The state; what was watched: the first read and all weights; and what is returned beside the state."""
        state: State = tensors
        returned: list[Any] = []
        reads: State = ()
        weights: State = ()
        for site in self._depth_sites:
            if _depth_watched:
                # Weights are asked for before the read, which may change the state.
                weights = (*weights, self._depth.call(self, "weights", state, site.sublayer))
                if not reads:
                    x, _ = self._depth.read(self, state, site.sublayer, None)
                    reads = (_first(x),)
            state = self._run(site, state, kwargs, returned)
        return (*state, *reads, *weights, *returned)

    def _begin(self, x: Tensor, kwargs: Mapping[str, Any]) -> DepthState:
        first = self._depth_sites[0].sublayer
        # Only the first layer may be given a tensor.
        if first != 0:
            raise RuntimeError(
                f"layer of sublayer {first} was given a tensor where the state of the layers before it was expected: "
                "something between the layers replaced it"
            )
        past = cache_of(kwargs)
        # Such a residual would read earlier tokens that a cache does not hold.
        residual = self._depth.residual
        if not residual.token_local and past is not None and past.get_seq_length() > 0:
            raise ValueError(
                f"residual '{residual.spec}' looks back along the tokens of its stream, which a KV cache does not "
                "keep: generate with use_cache=False"
            )
        # Models with streams of their own have made them of the embedding.
        if x.dim() > 3 or x.shape[-1] != residual.dim:
            x = x.flatten(2).unflatten(-1, (-1, residual.dim))[:, :, 0]
        return self._depth.begin(x.float() if self._depth_fp32 else x, self)

    def _run(
        self, site: Site, state: State, kwargs: Mapping[str, Any], returned: list[Any]
    ) -> State:
        """Read, run a sublayer's modules, write."""
        if site.before is not None:
            state = self._injected(site.before, state, kwargs)
        # The branches of a parallel sublayer have norms of their own, after the read.
        norm = None
        if site.norm is not None and site.second is None:
            norm = part_of(self, site.norm)
        if norm is not None and self._depth_fp32:
            norm = partial(_in_its_dtype, norm)
        x, state = self._depth.read(self, state, site.sublayer, norm)
        if site.second is None:
            y = self._body(site, x, kwargs, returned)
        else:
            assert isinstance(x, Tensor)
            normed = self._normed(site.norm, x, x)
            second = self._normed(site.second.norm, x, normed)
            y = self._body(site, normed, kwargs, returned)
            y = y + self._body(site.second, second, kwargs, [])
        for name in site.output:
            y = self._step(name, y, kwargs)
        # Granite scales what a sublayer adds.
        if self._depth_multiplier is not None:
            y = y * getattr(self, self._depth_multiplier)
        y = y.float() if self._depth_fp32 else y
        return self._depth.call(self, "write", state, site.sublayer, y)

    def _injected(self, name: str, state: State, kwargs: Mapping[str, Any]) -> State:
        """Add what a module makes of all streams, side by side, to each of them."""
        (streams,) = state
        given = self._depth_takes[name].given(kwargs)
        features = part_of(self, name)(streams.flatten(-2), **given)
        return (streams + features.view_as(streams),)

    # A branch without a norm of its own takes what is given `otherwise`.
    def _normed(self, norm: str | None, x: Tensor, otherwise: Tensor) -> Tensor:
        return otherwise if norm is None else part_of(self, norm)(x)

    def _body(self, site: Site, x: Read, kwargs: Mapping[str, Any], returned: list[Any]) -> Tensor:
        """The sublayer's output; what attention gives besides is added to `returned` where the layer returns it."""
        # The body gets the masks, positions and cache that the layer was given.
        given = self._depth_takes[site.body].given(kwargs)
        if site.separate:
            inputs = x if isinstance(x, tuple) else (x,) * len(site.separate)
            for (norm, argument), value in zip(site.separate, inputs, strict=True):
                given[argument] = part_of(self, norm)(value)
            x = given.pop(site.separate[0][1])
        # Query, key and value inputs go side by side through the attention's one argument.
        x = torch.cat(x, -1) if isinstance(x, tuple) else x
        out = part_of(self, site.body)(x, **given)
        # Attention may return its weights or a cache, which the layer hands on.
        if site.kind != "mlp":
            several = isinstance(out, tuple)
            returned += [out[i] if several and i is not None else None for i in self._depth_returns]
        y = _first(out)
        # Llama 4's experts give (B * T, D).
        if y.dim() != x.dim():
            y = y.view(*x.shape[:-1], -1)
        for name in site.out:
            y = self._step(name, y, kwargs)
        for name in site.beside:
            y = y + self._step(name, x, kwargs)
        return y

    def _step(self, name: str, y: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        part = part_of(self, name)
        if not isinstance(part, nn.Module):
            return nn.functional.dropout(y, p=part, training=self.training)
        return _first(part(y, **self._depth_takes[name].given(kwargs)))


def parts_of_layer(layer: Any) -> dict[str, Any]:
    """The attributes that a conversion put on a layer, for the modeling file, which writes its forward again."""
    names = ("sites", "takes", "arguments", "multiplier", "returns", "fp32")
    return {name: getattr(layer, f"_depth_{name}") for name in names}


def _in_its_dtype(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.to(next(norm.parameters()).dtype))


def _cut(flat: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split off the last `count`."""
    return flat[: len(flat) - count], flat[len(flat) - count :]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def take_input(which: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give the query, key or value projection its own third of the inputs that `_body` laid side by side."""
    x, *rest = args
    return (x.chunk(3, -1)[which], *rest)


def converted_layer(base: type[nn.Module]) -> type[nn.Module]:
    return _subclass(ConvertedLayer, base, **remakable(converted_layer, base))


def converted_norm(base: type[nn.Module]) -> type[nn.Module]:
    """The class of final norms of class `base`, which make the final read."""

    def call(self: Any, hidden_states: DepthState | Tensor) -> Tensor:
        if isinstance(hidden_states, DepthState):
            at, residual = hidden_states.at, self._depth.residual
            tensors = before_hop(self, residual, hidden_states.tensors, at)
            hidden_states = hidden_states.after(tensors, at)
        return base.__call__(self, hidden_states)

    def forward(self: Any, hidden_states: DepthState | Tensor) -> Tensor:
        if isinstance(hidden_states, DepthState):
            return self._depth.end(self, hidden_states, norm=partial(base.forward, self))
        return base.forward(self, hidden_states)

    return _subclass(base, forward=forward, __call__=call, **remakable(converted_norm, base))


def converted_model(base: type[nn.Module]) -> type[nn.Module]:
    """The model that owns the loop, inside a head: its hidden states are what each layer reads."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_loop(self, partial(base.forward, self, *args), kwargs)

    return _subclass(base, forward=forward, **remakable(converted_model, base))


def run_loop(body: Any, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """The forward of the model that owns the loop; the last of its hidden states is what the head sees."""
    options: dict[str, Any] = {}
    for name in ("output_hidden_states", "return_dict"):
        value = kwargs.get(name)
        options[name] = getattr(body.config, name) if value is None else value
    if not options["output_hidden_states"]:
        return forward(**kwargs)
    # The loop collects what layers hand on, which here is no tensor: the reads take its place.
    outputs, record = watch(partial(forward, **{**kwargs, "return_dict": True}))
    outputs["hidden_states"] = (*record.reads, outputs["hidden_states"][-1])
    return outputs if options["return_dict"] else outputs.to_tuple()


def _subclass(*bases: type, **members: Any) -> type[nn.Module]:
    """A class that prints, and is looked up in transformers' tables, as the one it stands for; made once."""
    # One class for all instances, so that they compile and pickle once.
    if bases not in _subclasses:
        plain = bases[-1]
        names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        _subclasses[bases] = type(plain.__name__, bases, {**names, **members})
    return _subclasses[bases]


_subclasses: dict[tuple[type, ...], type[nn.Module]] = {}
