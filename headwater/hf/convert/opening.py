"""Move a released residual's weights out of the model's own modules into ours, and back."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.residuals import Residual
from headwater.residuals.registry import with_options

from .layers import Site
from .releases import Release


@dataclass(frozen=True)
class Taken:
    """A module that a model goes without while its residual is ours."""

    owner: nn.Module
    name: str
    module: nn.Module
    read: int  # that its weights are of


class PassOn(nn.Module):
    """Hands the state on where the model's own final read stood; the final norm makes that read."""

    def forward(self, *states: Any) -> Any:
        # Inkling-2 gives the sums of its blocks too, and takes a tuple.
        return states[-1:] if len(states) > 1 else states[0]


def released_spec(release: Release, config: Any, sublayers: int) -> str:
    """The spec of our residual with the options that a release's config says."""
    options = {ours: getattr(config, theirs) for ours, theirs in release.options.items()}
    # Theirs counts decoder layers, and may be longer than the network.
    if "block" in options:
        options["block"] = min(2 * options["block"], sublayers)
    return with_options(release.residual, **options)


def take_modules(
    body: nn.Module, layers: Sequence[nn.Module], groups: Sequence[Sequence[Site]], release: Release
) -> list[Taken]:
    """Take the modules of the released residual out of the model."""
    places: list[tuple[nn.Module, str, int]] = []
    for layer, sites in zip(layers, groups, strict=True):
        for site, name in zip(sites, release.reads, strict=True):
            places.append((layer, name, site.sublayer))
    places.append((body, release.final, groups[-1][-1].sublayer + 1))
    taken: list[Taken] = []
    for owner, name, read in places:
        module = getattr(owner, name)
        # Inkling-2's first attention has nothing to choose from.
        if module is not None:
            taken.append(Taken(owner, name, module, read))
            setattr(owner, name, PassOn() if owner is body else None)
    return taken


@torch.no_grad()
def copy_weights(
    taken: Sequence[Taken], residual: Residual, release: Release, fp32: Collection[str]
) -> None:
    """Give our residual the weights of the modules that it stands for, in the dtypes that they have there.

    `fp32`: parts of the names of what transformers loads in fp32, whatever the dtype of the rest.
    """
    for one, name, places, ours in _places(taken, residual, release):
        theirs = one.module.get_parameter(name)
        # While a folder is loaded there are no values yet.
        if not theirs.is_meta:
            ours.data = theirs.flatten()[places].view_as(ours).to(ours.device, copy=True)
        elif not any(part in f"{one.name}.{name}" for part in fp32):
            ours.data = ours.data.to(theirs.dtype)


@torch.no_grad()
def give_back(taken: Sequence[Taken], residual: Residual, release: Release) -> None:
    """Put the modules into the model again, with the weights that the residual has now."""
    for one, name, places, ours in _places(taken, residual, release):
        theirs = one.module.get_parameter(name)
        # Of a model that was loaded opened they have never had values.
        if theirs.is_meta:
            path, _, leaf = name.rpartition(".")
            theirs = nn.Parameter(torch.empty_like(theirs, dtype=ours.dtype, device=ours.device))
            setattr(one.module.get_submodule(path), leaf, theirs)
        theirs.view(-1)[places.to(theirs.device)] = ours.flatten().to(theirs)
    for one in taken:
        setattr(one.owner, one.name, one.module)


def _places(
    taken: Sequence[Taken], residual: Any, release: Release
) -> Iterator[tuple[Taken, str, Tensor, nn.Parameter]]:
    """Each of our parameters, with the name of theirs that holds its numbers, and their places there."""
    parameters = dict(residual.named_parameters())
    for one in taken:
        for name, theirs in one.module.named_parameters():
            places = torch.arange(theirs.numel(), device="cpu").view(theirs.shape)
            if release.transposed and len(places) == residual.streams * (residual.streams + 2):
                places = _transposed(places, residual.streams)
            path = f"{release.table}.{one.read}.{release.names[name]}"
            yield one, name, places.flatten(), parameters[path]


def _transposed(rows: Tensor, streams: int) -> Tensor:
    """The rows of pre, post and a mixing matrix, with the matrix transposed."""
    first, matrix = rows[: 2 * streams], rows[2 * streams :]
    return torch.cat((first, matrix.unflatten(0, (streams, streams)).transpose(0, 1).flatten(0, 1)))
