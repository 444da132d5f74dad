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

    @property
    def parts(self) -> tuple["Site", ...]:
        return (self,) if self.second is None else (self, self.second)

    @property
    def bodies(self) -> tuple[str, ...]:
        """Names of the modules that are called after a norm."""
        return (
            tuple(name for part in self.parts for name in (part.body, *part.out, *part.beside))
            + self.output
        )

    @property
    def names(self) -> set[str]:
        return {*self.bodies, *(part.norm for part in self.parts if part.norm is not None)}


def sites_of(layer: nn.Module, layout: Layout, first: int) -> tuple[Site, ...]:
    """The sublayers of a layer; `first` is the index of the first."""
    parallel = (
        getattr(layer, layout.parallel) if isinstance(layout.parallel, str) else layout.parallel
    )
    kind = "attention" if layout.mlp else "mixer"
    attention = Site(
        first, kind, layout.attention_norm, present(layer, layout.attention), layout.attention_out
    )
    if not layout.mlp:
        return (replace(attention, output=layout.output),)
    body = present(layer, layout.mlp)
    beside = tuple(
        name
        for name in layout.mlp_beside
        if name != body and isinstance(part_of(layer, name), nn.Module)
    )
    mlp = Site(first, "mlp", layout.mlp_norm, body, layout.mlp_out, beside)
    if not parallel:
        return replace(attention, output=layout.output), replace(
            mlp, sublayer=first + 1, output=layout.output
        )
    second = replace(mlp, norm=layout.parallel_norm)
    return (replace(attention, kind="parallel", second=second, output=layout.output),)


def present(layer: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if isinstance(part_of(layer, name), nn.Module):
            return name
    raise LookupError(f"a {type(layer).__name__} has none of the modules {', '.join(names)}")


def part_of(layer: nn.Module, path: str) -> Any:
    """By its name, or by names with dots between them; None where there is none."""
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


class ConvertedLayer(nn.Module):
    """Mixed in before a decoder layer's own class; what the conversion put on the instance is in `_depth_*`."""

    _depth: Depth
    _depth_sites: tuple[Site, ...]
    _depth_arguments: tuple[
        str, ...
    ]  # names of the layer's positional arguments after the hidden state
    _depth_multiplier: str | None
    _depth_takes: Mapping[
        str, Takes
    ]  # by the name of a module, which of the layer's arguments it gets
    _depth_returns: tuple[
        int | None, ...
    ]  # which of attention's results are returned beside the hidden state
    _depth_fp32: bool  # whether the stream is kept in fp32, beside modules of half precision

    def __call__(self, hidden_states: DepthState | Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(self._depth_arguments, args, strict=False))
        state = (
            hidden_states
            if isinstance(hidden_states, DepthState)
            else self._begin(hidden_states, kwargs)
        )
        # The state goes in and out as flat positional tensors: re-entrant checkpointing sees gradients of nothing else.
        # What is wanted goes along: a recomputation in the backward pass must do what the forward pass did.
        watched = state.record is not None
        tensors = before_hop(
            self, self._depth.residual, state.tensors, self._depth_sites[0].sublayer
        )
        flat = super().__call__(*tensors, _depth_watched=watched, **kwargs)
        flat, returned = _cut(flat, len(self._depth_returns))
        at = self._depth_sites[-1].sublayer + 1
        after = self._watched(state, flat, at) if watched else state.after(flat, at)
        return (after, *returned) if returned else after

    def _watched(self, state: DepthState, flat: State, at: int) -> DepthState:
        *after, read = flat[: -len(self._depth_sites)]
        return state.after(tuple(after), at, weights=flat[-len(self._depth_sites) :], reads=(read,))

    def forward(
        self, *tensors: Tensor, _depth_watched: bool = False, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The state; what was watched; and what is returned beside the state."""
        state: State = tensors
        returned: list[Any] = []
        weights: State = ()
        first: Tensor | None = None
        depth = self._depth
        for site in self._depth_sites:
            if _depth_watched:
                weights = (*weights, depth.call(self, "weights", state, site.sublayer))
                if first is None:
                    x, _ = depth.read(self, state, site.sublayer, None)
                    first = x[0] if isinstance(x, tuple) else x
            state = self._run(site, state, kwargs, returned)
        return (*state, *returned) if first is None else (*state, first, *weights, *returned)

    def _begin(self, x: Tensor, kwargs: Mapping[str, Any]) -> DepthState:
        if self._depth_sites[0].sublayer != 0:
            raise RuntimeError(
                f"layer of sublayer {self._depth_sites[0].sublayer} was given a tensor where the state of the layers "
                "before it was expected: something between the layers replaced it"
            )
        past = cache_of(kwargs)
        residual = self._depth.residual
        if not residual.token_local and past is not None and past.get_seq_length() > 0:
            raise ValueError(
                f"residual '{residual.spec}' looks back along the tokens of its stream, which a KV cache does not "
                "keep: generate with use_cache=False"
            )
        return self._depth.begin(x.float() if self._depth_fp32 else x, self)

    def _run(
        self, site: Site, state: State, kwargs: Mapping[str, Any], returned: list[Any]
    ) -> State:
        norm = None if site.norm is None or site.second is not None else part_of(self, site.norm)
        norm = partial(_in_its_dtype, norm) if self._depth_fp32 and norm is not None else norm
        x, state = self._depth.read(self, state, site.sublayer, norm)
        if site.second is None:
            y = self._body(site, x, kwargs, returned)
        else:
            assert isinstance(x, Tensor)
            normed = x if site.norm is None else part_of(self, site.norm)(x)
            second = normed if site.second.norm is None else part_of(self, site.second.norm)(x)
            y = self._body(site, normed, kwargs, returned) + self._body(
                site.second, second, kwargs, []
            )
        for name in site.output:
            y = self._step(name, y, kwargs)
        if self._depth_multiplier is not None:
            y = y * getattr(self, self._depth_multiplier)
        return self._depth.call(
            self, "write", state, site.sublayer, y.float() if self._depth_fp32 else y
        )

    def _body(self, site: Site, x: Read, kwargs: Mapping[str, Any], returned: list[Any]) -> Tensor:
        """The sublayer's output; what attention gives besides is added to `returned` where the layer returns it."""
        x = torch.cat(x, -1) if isinstance(x, tuple) else x
        out = part_of(self, site.body)(x, **self._depth_takes[site.body].given(kwargs))
        if site.kind != "mlp":
            several = isinstance(out, tuple)
            returned += [out[i] if several and i is not None else None for i in self._depth_returns]
        y = _first(out)
        y = (
            y if y.dim() == x.dim() else y.view(*x.shape[:-1], -1)
        )  # Llama 4's experts give (B * T, D)
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
    """Without the last `count`, and those."""
    return flat[: len(flat) - count], flat[len(flat) - count :]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def take_input(which: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook before the query, key or value projection: its own third of the inputs that `_body` laid side by side."""
    x, *rest = args
    return (x.chunk(3, -1)[which], *rest)


def converted_layer(base: type[nn.Module]) -> type[nn.Module]:
    return _subclass(ConvertedLayer, base, **remakable(converted_layer, base))


def converted_norm(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, hidden_states: DepthState | Tensor) -> Tensor:
        if isinstance(hidden_states, DepthState):
            at = hidden_states.at
            hidden_states = hidden_states.after(
                before_hop(self, self._depth.residual, hidden_states.tensors, at), at
            )
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


def run_loop(
    body: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The forward of the model that owns the loop; the last of its hidden states is what the head sees."""
    asked = kwargs.get("output_hidden_states")
    asked = body.config.output_hidden_states if asked is None else asked
    if not asked:
        return forward(*args, **kwargs)
    if asked is not True:
        raise ValueError(
            f"a converted model returns all hidden states or none: output_hidden_states={asked!r}"
        )
    by_name = kwargs.get("return_dict")
    by_name = body.config.return_dict if by_name is None else by_name
    outputs, record = watch(
        partial(forward, *args, **kwargs if by_name else {**kwargs, "return_dict": True})
    )
    outputs["hidden_states"] = (*record.reads, outputs["hidden_states"][-1])
    return outputs if by_name else outputs.to_tuple()


def _subclass(*bases: type, **members: Any) -> type[nn.Module]:
    """A class that prints, and is looked up in transformers' tables, as the one it stands for; made once."""
    if bases not in _made:
        names = {
            name: getattr(bases[-1], name) for name in ("__module__", "__qualname__", "__doc__")
        }
        _made[bases] = type(bases[-1].__name__, bases, {**names, **members})
    return _made[bases]


_made: dict[tuple[type, ...], type[nn.Module]] = {}
