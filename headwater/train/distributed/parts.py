"""Parts of tensors and models that a rank holds, under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from headwater._torch import local_rectangle
from headwater.models import Decoder
from headwater.models.decoder import saved_tensors
from headwater.models.moe import Router, routers


class Parts(nn.Module):
    """The pruned decoders of a pipeline rank as one model, under the parameter names of the whole.

    `shared`: parameters that another rank has too and accounts for, in norms and in checkpoints.
    """

    def __init__(
        self, stages: Iterable[nn.Module], decoders: Iterable[Decoder], shared: frozenset[str]
    ) -> None:
        super().__init__()
        # What FSDP2 has wrapped are the stages; names are those of the decoders inside.
        self.stages = nn.ModuleList(stages)
        self.decoders = tuple(decoders)
        self.shared = shared

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for decoder in self.decoders:
            yield from decoder.named_parameters()

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Every stage has its own copy; the names repeat."""
        for decoder in self.decoders:
            yield from decoder.named_buffers()


def decoders_of(model: nn.Module) -> tuple[Decoder, ...]:
    """The decoder, or the pruned ones of a pipeline rank."""
    return model.decoders if isinstance(model, Parts) else (cast(Decoder, model),)


def saved_parts(model: nn.Module) -> dict[str, Tensor]:
    """Collect what a checkpoint keeps of the part of a model that is here, by the names of the whole."""
    tensors: dict[str, Tensor] = {}
    for decoder in decoders_of(model):
        tensors |= saved_tensors(decoder)
    return tensors


def routers_of(model: nn.Module) -> dict[str, Router]:
    here: dict[str, Router] = {}
    for decoder in decoders_of(model):
        here |= routers(decoder)
    return here


def counted_elsewhere(model: nn.Module) -> frozenset[str]:
    return model.shared if isinstance(model, Parts) else frozenset()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`: one rectangle."""
    if not isinstance(like, DTensor):
        return whole
    return whole[local_rectangle(like)]


def copies(value: Tensor) -> tuple[int, bool]:
    """Count the ranks of its stage that hold the same part of a tensor, and tell whether this one is the first."""
    if not isinstance(value, DTensor):
        return 1, True
    # Along an axis of the mesh that does not divide the tensor, all ranks hold the same.
    mesh = value.device_mesh
    coordinate = cast(list[int], mesh.get_coordinate())
    count, first = 1, True
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, Replicate):
            count *= mesh.shape[axis]
            first = first and coordinate[axis] == 0
    return count, first


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def squared_norm(gradient: Tensor | None) -> float:
    """This rank's share of a squared norm: over all ranks of a stage the shares add up."""
    if gradient is None:
        return 0.0
    # Copies share one square among them.
    total = local(gradient).double().square().sum().item()
    return total / copies(gradient)[0]
