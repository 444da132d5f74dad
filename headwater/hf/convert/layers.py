"""A decoder layer whose residual is swapped, inside the model's own loop.

The loop of every model in transformers treats what passes between layers as one opaque value:

    for layer in self.layers:
        hidden_states = layer(hidden_states, attention_mask=..., position_embeddings=..., ...)
    hidden_states = self.norm(hidden_states)

So the first converted layer begins the residual's state, layers hand a `DepthState` to each other, and the final norm
makes the final read. Masks, positions and caches stay the model's business; no loop is written again. The instance's
class is replaced by a subclass made for it (`__call__` is looked up on the class), and nothing else is touched.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwater.residuals import Read, State

from .depth import Depth, DepthState, watch
from .devices import before_hop
from .layouts import Layout
from .remake import remakable


@dataclass(frozen=True)
class Site:
    """One sublayer of a layer, by the names of its modules. `sublayer` is its index in the whole network."""

    sublayer: int
    kind: str  # attention, mlp, or parallel: both
    norm: str | None
    body: str
    out: tuple[str, ...]
    second: "Site | None" = None  # the MLP of a parallel layer


def sites_of(layer: nn.Module, layout: Layout, first: int) -> tuple[Site, ...]:
    """The sublayers of a layer; `first` is the index of the first."""
    parallel = getattr(layer, layout.parallel) if isinstance(layout.parallel, str) else layout.parallel
    attention, mlp = present(layer, layout.attention), present(layer, layout.mlp)
    if not parallel:
        return (
            Site(first, "attention", layout.attention_norm, attention, layout.attention_out),
            Site(first + 1, "mlp", layout.mlp_norm, mlp, layout.mlp_out),
        )
    second = Site(first, "mlp", layout.parallel_norm, mlp, layout.mlp_out)
    return (Site(first, "parallel", layout.attention_norm, attention, layout.attention_out, second),)


def present(layer: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if isinstance(getattr(layer, name, None), nn.Module):
            return name
    raise LookupError(f"a {type(layer).__name__} has none of the modules {', '.join(names)}")


class ConvertedLayer(nn.Module):
    """Mixed in before a decoder layer's own class; what the conversion put on the instance is in `_depth_*`."""

    _depth: Depth
    _depth_sites: tuple[Site, ...]
    _depth_arguments: tuple[str, ...]  # names of the layer's positional arguments after the hidden state
    _depth_multiplier: str | None
    _depth_accepts: frozenset[str] | None  # what attention can be called with; None: anything

    def __call__(self, hidden_states: DepthState | Tensor, *args: Any, **kwargs: Any) -> DepthState:
        kwargs.update(zip(self._depth_arguments, args, strict=False))
        state = hidden_states if isinstance(hidden_states, DepthState) else self._begin(hidden_states, kwargs)
        # The state goes in and out as flat positional tensors: re-entrant checkpointing sees gradients of nothing else.
        # What is wanted goes along: a recomputation in the backward pass must do what the forward pass did.
        watched = state.record is not None
        tensors = before_hop(self, self._depth.residual, state.tensors, self._depth_sites[0].sublayer)
        flat = super().__call__(*tensors, _depth_watched=watched, **kwargs)
        if not watched:
            return state.after(flat)
        *after, read = flat[: -len(self._depth_sites)]
        return state.after(tuple(after), weights=flat[-len(self._depth_sites) :], reads=(read,))

    def forward(self, *tensors: Tensor, _depth_watched: bool = False, **kwargs: Any) -> State:
        state: State = tensors
        weights: State = ()
        first: Tensor | None = None
        depth = self._depth
        for site in self._depth_sites:
            if _depth_watched:
                weights = (*weights, depth.call(self, "weights", state, site.sublayer))
                if first is None:
                    x, _ = depth.read(self, state, site.sublayer, None)
                    first = x[0] if isinstance(x, tuple) else x
            state = self._run(site, state, kwargs)
        return state if first is None else (*state, first, *weights)

    def _begin(self, x: Tensor, kwargs: Mapping[str, Any]) -> DepthState:
        if self._depth_sites[0].sublayer != 0:
            raise RuntimeError(
                f"layer of sublayer {self._depth_sites[0].sublayer} was given a tensor where the state of the layers "
                "before it was expected: something between the layers replaced it"
            )
        past = kwargs.get("past_key_values", kwargs.get("layer_past"))
        residual = self._depth.residual
        if not residual.token_local and past is not None and past.get_seq_length() > 0:
            raise ValueError(
                f"residual '{residual.spec}' looks back along the tokens of its stream, which a KV cache does not "
                "keep: generate with use_cache=False"
            )
        return self._depth.begin(x, self)

    def _run(self, site: Site, state: State, kwargs: Mapping[str, Any]) -> State:
        norm = None if site.norm is None or site.second is not None else getattr(self, site.norm)
        x, state = self._depth.read(self, state, site.sublayer, norm)
        if site.second is None:
            y = self._body(site, x, kwargs)
        else:
            assert isinstance(x, Tensor)
            normed = x if site.norm is None else getattr(self, site.norm)(x)
            second = normed if site.second.norm is None else getattr(self, site.second.norm)(x)
            y = self._body(site, normed, kwargs) + self._body(site.second, second, kwargs)
        if self._depth_multiplier is not None:
            y = y * getattr(self, self._depth_multiplier)
        return self._depth.call(self, "write", state, site.sublayer, y)

    def _body(self, site: Site, x: Read, kwargs: Mapping[str, Any]) -> Tensor:
        body = getattr(self, site.body)
        if site.kind == "mlp":
            y = body(x)
        else:
            accepts = self._depth_accepts
            known = kwargs if accepts is None else {name: value for name, value in kwargs.items() if name in accepts}
            y = body(torch.cat(x, -1) if isinstance(x, tuple) else x, **known)
        y = y[0] if isinstance(y, tuple) else y
        for name in site.out:
            y = getattr(self, name)(y)
        return y


def take_input(which: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook before the query, key or value projection: its own third of the inputs that `_body` laid side by side."""
    x, *rest = args
    return (x.chunk(3, -1)[which], *rest)


def converted_layer(base: type[nn.Module]) -> type[nn.Module]:
    return _subclass(ConvertedLayer, base, **remakable(converted_layer, base))


def converted_norm(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, hidden_states: DepthState | Tensor) -> Tensor:
        if isinstance(hidden_states, DepthState):
            residual = self._depth.residual
            hidden_states = hidden_states.after(before_hop(self, residual, hidden_states.tensors, residual.sublayers))
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
        return run_loop(self, partial(base.forward, self), args, kwargs)

    return _subclass(base, forward=forward, **remakable(converted_model, base))


def run_loop(body: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The forward of the model that owns the loop; the last of its hidden states is what the head sees."""
    asked = kwargs.get("output_hidden_states")
    asked = body.config.output_hidden_states if asked is None else asked
    if not asked:
        return forward(*args, **kwargs)
    if asked is not True:
        raise ValueError(f"a converted model returns all hidden states or none: output_hidden_states={asked!r}")
    outputs, record = watch(partial(forward, *args, **kwargs))
    outputs["hidden_states"] = (*record.reads, outputs["hidden_states"][-1])
    return outputs


def _subclass(*bases: type, **members: Any) -> type[nn.Module]:
    """A class that prints, and is looked up in transformers' tables, as the one it stands for; made once."""
    if bases not in _made:
        names = {name: getattr(bases[-1], name) for name in ("__module__", "__qualname__", "__doc__")}
        _made[bases] = type(bases[-1].__name__, bases, {**names, **members})
    return _made[bases]


_made: dict[tuple[type, ...], type[nn.Module]] = {}


def positional_names(layer: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(layer).forward).parameters)[2:]


def accepted(body: nn.Module) -> frozenset[str] | None:
    parameters = inspect.signature(body.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
