"""Parameter groups for an optimizer: which parameters decay, and which learn at another rate.

Only matrices of the layers decay. Embeddings, head, norms, biases and whatever the residual owns do not: pulling those
toward zero changes what they mean. The residual's queries have a factor on the learning rate, because Adam moves every
one of a query's D numbers by about the learning rate in a step, and a key has D numbers of size one: a logit can move
by D times the rate, and the depth weights close before the layers have learned what to write.
"""

from collections import Counter
from typing import Any

from torch import nn

from .base import Residual

QUERY = "query"  # the name that every residual gives to the parameter with which a read scores its sources


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.1, query_lr: float = 0.1
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer such as `torch.optim.AdamW`, for a training loop of your own.

    Arguments:
        model: any module: a `Decoder`, a transformers model that `headwater.convert` has converted, your own. A matrix
            decays if it belongs to a numbered stack of layers (`nn.ModuleList`, `nn.Sequential`, an `nn.ModuleDict`
            whose keys end in numbers, or attributes such as `layer0` and `layer1`); an embedding, a norm or an
            nn.Conv1d inside of one does not.
        lr: the learning rate.
        weight_decay: of the matrices.
        query_lr: factor on the learning rate of the residual's queries, 0.1 by default: with Adam and a factor of
            one, Block Attention Residuals ended above the plain residual in six-layer models of our study. They are the
            parameters called `query`, of attnres-block, attnres-full, delta-attnres, hyper-attnres, deepcrossattention
            and depth-window; other residuals have none.

    Returns: up to three groups, each with "name", "params", "lr", "weight_decay" and "lr_factor"; together they hold
        every parameter once. They are called "matrices", "rest" and "queries"; one without parameters is left out. A
        schedule that sets the rate itself, as against scaling it, sets `rate * group["lr_factor"]`.

    Raises: ValueError for a rate, decay or factor below zero, or if something is to decay and no matrix was found;
        TypeError for what is no module, such as `model.parameters()`.

        optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=3e-3, weight_decay=0.1))
        print([(group["name"], group["lr"]) for group in optimizer.param_groups])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model, whose names say what decays; got a {type(model).__name__}"
        )
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("query_lr", query_lr)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be 0 or a positive number, got {value}")
    sorted_parameters = sort_parameters(model)
    if weight_decay and not sorted_parameters["matrices"]:
        raise ValueError(
            f"weight_decay is {weight_decay}, and no parameter of this {type(model).__name__} is a matrix in a "
            "numbered stack of layers: keep the layers in an nn.ModuleList, or pass weight_decay=0"
        )
    factors = {"matrices": 1.0, "rest": 1.0, "queries": query_lr}
    groups: list[dict[str, Any]] = []
    for name, parameters in sorted_parameters.items():
        if not parameters:
            continue
        group: dict[str, Any] = {"name": name, "params": parameters, "lr": lr * factors[name]}
        group["weight_decay"] = weight_decay if name == "matrices" else 0.0
        group["lr_factor"] = factors[name]
        groups.append(group)
    return groups


def sort_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Every parameter once, in the model's order, under "matrices", "rest" or "queries"."""
    of_residuals: set[int] = set()
    undecayed: set[int] = set()
    stacks: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, Residual):
            of_residuals |= {id(parameter) for parameter in module.parameters()}
        if keeps_its_scale(module):
            undecayed |= {id(parameter) for parameter in module.parameters(recurse=False)}
        stacks += [f"{path}.{key}.".lstrip(".") for key in stack_of(module)]

    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "rest": [], "queries": []}
    for name, parameter in model.named_parameters():
        *path_to_it, last = name.split(".")
        numbered = any(part.isdigit() for part in path_to_it) or name.startswith(tuple(stacks))
        is_matrix = parameter.ndim > 1 and not last.endswith("bias") and numbered
        if id(parameter) in of_residuals:
            groups["queries" if last == QUERY else "rest"].append(parameter)
        elif is_matrix and id(parameter) not in undecayed:
            groups["matrices"].append(parameter)
        else:
            groups["rest"].append(parameter)
    return groups


def stack_of(module: nn.Module) -> list[str]:
    """Names of its layers: those in a dict that end in a number, and several attributes that differ in it alone. One
    such attribute is none: a model may be called `gpt2`."""
    stems = {
        key: key.rstrip("0123456789") for key, _ in module.named_children() if key[-1:].isdigit()
    }
    several = Counter(stems.values())
    return [
        key for key, stem in stems.items() if isinstance(module, nn.ModuleDict) or several[stem] > 1
    ]


def keeps_its_scale(module: nn.Module) -> bool:
    """Embeddings, norms, of which transformers has a class for each architecture, and convolutions over tokens."""
    return isinstance(module, nn.Embedding | nn.Conv1d) or "norm" in type(module).__name__.lower()
