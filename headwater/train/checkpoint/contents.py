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
    tensors = {}
    for name, value in saved_parts(model).items():
        if name not in elsewhere:
            tensors[f"model/{name}"] = value.detach()
    # Momenta and counters, by the parameter that they belong to.
    for kind, optimizer in optimizers.items():
        for parameter, slots in optimizer.state.items():
            name = names[id(parameter)]
            if name not in elsewhere:
                tensors |= slots_by_name(kind, name, slots)
    return tensors


def slots_by_name(kind: str, name: str, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"optimizer/{kind}/{name}/{slot}": value for slot, value in slots.items()}


def fill_model(reader: Reader, model: nn.Module) -> None:
    """The whole model, in a process by itself."""
    read(reader, model_targets(reader, model, whole=True), alone=True)


def fill(reader: Reader, model: nn.Module, optimizers: Optimizers, *, alone: bool) -> None:
    """Model and optimizers, divided in any way; alone, the model has all names."""
    # Tensors are made empty, filled by the reader, then handed to the optimizers.
    targets = model_targets(reader, model, whole=alone)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[str, dict[int, dict[str, Tensor]]] = {}
    for kind, optimizer in optimizers.items():
        shapes = slot_shapes(reader, kind)
        states[kind] = {}
        for i, parameter in enumerate(parameters_of(optimizer)):
            name = names[id(parameter)]
            if name in shapes:
                slots = empty_slots(parameter, shapes[name])
                states[kind][i] = slots
                targets |= slots_by_name(kind, name, slots)
    read(reader, targets, alone=alone)
    # The settings of the groups stay: rates come from the schedule.
    for kind, optimizer in optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states[kind], "param_groups": groups})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters in the order by which torch numbers them."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def model_targets(reader: Reader, model: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """The tensors to fill, if they fit. `whole`: the model has all names, so one that it lacks is an error too."""
    parts = saved_parts(model)
    # A rank of a pipeline has some of the names.
    there = reader.shapes("model")
    if not whole:
        there = {name: shape for name, shape in there.items() if name in parts}
    # Names and shapes are compared before anything is read.
    shapes = {name: tensor.shape for name, tensor in parts.items()}
    with user_values():
        check_fit(shapes, there, "weights do not fit the model")
    return {f"model/{name}": tensor.detach() for name, tensor in parts.items()}


def slot_shapes(reader: Reader, kind: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of what the checkpoint has of each parameter in an optimizer."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in reader.shapes(f"optimizer/{kind}").items():
        name, _, slot = key.partition("/")
        shapes.setdefault(name, {})[slot] = shape
    return shapes


def empty_slots(parameter: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Room for slots. One as large as the parameter is divided like it; a counter is whole on every rank."""
    slots = {}
    for slot, shape in shapes.items():
        # A momentum is as large as its parameter, a counter is one number.
        if shape == tuple(parameter.shape):
            slots[slot] = torch.empty_like(parameter, requires_grad=False)
        else:
            slots[slot] = torch.empty(shape)
    return slots
