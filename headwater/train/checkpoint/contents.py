"""The tensors of a run by the names they have in a checkpoint, and back into model and optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headwater.errors import check_fit, user_values
from headwater.train.checkpoint.storage import Reader, read
from headwater.train.distributed.parts import counted_elsewhere, saved_parts

Optimizers = Mapping[str, torch.optim.Optimizer]


def contents(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Collect what this rank holds, by names such as "model/parameter" and "optimizer/kind/parameter/slot".

    The routers' biases are among the model's. Learning rates come from the schedule. Of tied copies on two ranks, one
    is left out.
    """
    elsewhere = counted_elsewhere(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {
        f"model/{name}": value.detach()
        for name, value in saved_parts(model).items()
        if name not in elsewhere
    }
    for kind, optimizer in optimizers.items():
        for parameter, slots in optimizer.state.items():
            name = names[id(parameter)]
            if name not in elsewhere:
                tensors |= {
                    f"optimizer/{kind}/{name}/{slot}": value for slot, value in slots.items()
                }
    return tensors


def fill_model(reader: Reader, model: nn.Module) -> None:
    """The whole model, in a process by itself."""
    read(reader, model_targets(reader, model, whole=True), alone=True)


def fill(reader: Reader, model: nn.Module, optimizers: Optimizers, *, alone: bool) -> None:
    """Model and optimizers, divided in any way; alone, the model has all names."""
    slots = {
        kind: empty_slots(reader, kind, model, optimizer) for kind, optimizer in optimizers.items()
    }
    targets = model_targets(reader, model, whole=alone)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for kind, parameters in slots.items():
        for parameter, values in parameters.items():
            targets |= {
                f"optimizer/{kind}/{names[id(parameter)]}/{slot}": value
                for slot, value in values.items()
            }
    read(reader, targets, alone=alone)
    for kind, optimizer in optimizers.items():
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {
            i: slots[kind][parameter]
            for i, parameter in enumerate(order)
            if slots[kind].get(parameter)
        }
        optimizer.load_state_dict(
            {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        )


def model_targets(reader: Reader, model: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """The tensors to fill, if they fit. `whole`: the model has all names, so one that it lacks is an error too."""
    parts = saved_parts(model)
    there = reader.shapes("model")
    if not whole:
        there = {name: shape for name, shape in there.items() if name in parts}
    with user_values():
        check_fit(
            {name: tensor.shape for name, tensor in parts.items()},
            there,
            "weights do not fit the model",
        )
    return {f"model/{name}": tensor.detach() for name, tensor in parts.items()}


def empty_slots(
    reader: Reader, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[Tensor, dict[str, Tensor]]:
    """Room for what the checkpoint has of each parameter. A slot as large as its parameter is divided like it; a
    counter is whole on every rank."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    there: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in reader.shapes(f"optimizer/{kind}").items():
        name, _, slot = key.partition("/")
        there.setdefault(name, {})[slot] = shape
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        parameter: {
            slot: torch.empty_like(parameter, requires_grad=False)
            if shape == tuple(parameter.shape)
            else torch.empty(shape)
            for slot, shape in there.get(names[id(parameter)], {}).items()
        }
        for parameter in parameters
    }
