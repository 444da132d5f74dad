"""Parameter groups for an optimizer: which parameters decay, and which learn at another rate.

Only matrices of the layers decay. Embeddings, head, norms, biases and whatever the residual owns do
not: pulling those toward zero changes what they mean. The residual's queries have a factor on the
learning rate, because Adam moves every one of a query's D numbers by about the learning rate in a
step, and a key has D numbers of size one: a logit can move by D times the rate, and the depth
weights close before the layers have learned what to write.
"""

from collections import Counter
from typing import Any

from torch import nn

from .base import Residual

# The name that every residual gives to the parameter with which a read scores its sources.
QUERY = "query"


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.1, query_lr: float = 0.1
) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer such as `torch.optim.AdamW`, for a training loop of your
    own.

    Arguments:
        model: any module: a `Decoder`, a transformers model that `headwater.convert` has converted,
            your own. A matrix decays if it belongs to a numbered stack of layers (`nn.ModuleList`,
            `nn.Sequential`, an `nn.ModuleDict` whose keys end in numbers, or attributes such as
            `layer0` and `layer1`); an embedding, a norm or an nn.Conv1d inside of one does not.
        lr: the learning rate.
        weight_decay: of the matrices.
        query_lr: factor on the learning rate of the residual's queries, 0.1 by default: with Adam
            and a factor of one, Block Attention Residuals ended above the plain residual in
            six-layer models of our study. They are the parameters called `query`, of attnres-block,
            attnres-full, attnres-routed, delta-attnres, hyper-attnres, deepcrossattention and
            depth-window; other residuals have none.

    Returns: up to three groups, each with "name", "params", "lr", "weight_decay" and "lr_factor";
        together they hold every parameter once. They are called "matrices", "rest" and "queries";
        one without parameters is left out. A schedule that sets the rate itself, as against scaling
        it, sets `rate * group["lr_factor"]`.

    Raises: ValueError if something is to decay and no matrix was found.

        optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=3e-3, weight_decay=0.1))
        print([(group["name"], group["lr"]) for group in optimizer.param_groups])
    """
    parameters_by_group = sort_parameters(model)
    if weight_decay and not parameters_by_group["matrices"]:
        raise ValueError(
            f"weight_decay is {weight_decay}, and no parameter of this {type(model).__name__} is a "
            "matrix in a numbered stack of layers: keep the layers in an nn.ModuleList, or pass "
            "weight_decay=0"
        )
    groups: list[dict[str, Any]] = []
    for name, parameters in parameters_by_group.items():
        if not parameters:
            continue
        # Queries learn at a rate of their own, and only matrices decay.
        factor = query_lr if name == "queries" else 1.0
        decay = weight_decay if name == "matrices" else 0.0
        group = {"name": name, "params": parameters, "lr": lr * factor}
        groups.append({**group, "weight_decay": decay, "lr_factor": factor})
    return groups


def sort_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return every parameter once, in the model's order, under "matrices", "rest" or "queries"."""
    # By identity: tied parameters have several names.
    of_residuals: set[int] = set()
    undecayed: set[int] = set()
    stacks: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, Residual):
            of_residuals.update(map(id, module.parameters()))
        if keeps_its_scale(module):
            undecayed.update(map(id, module.parameters(recurse=False)))
        for key in stack_of(module):
            stacks.append(f"{path}.{key}.".lstrip("."))

    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    queries: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        *path_to_it, last = name.split(".")
        if id(parameter) in of_residuals:
            group = queries if last == QUERY else rest
            group.append(parameter)
            continue
        # Of all others, matrices in a numbered stack of layers decay.
        numbered = any(part.isdigit() for part in path_to_it) or name.startswith(tuple(stacks))
        is_matrix = parameter.ndim > 1 and not last.endswith("bias")
        decays = is_matrix and numbered and id(parameter) not in undecayed
        group = matrices if decays else rest
        group.append(parameter)
    return {"matrices": matrices, "rest": rest, "queries": queries}


def stack_of(module: nn.Module) -> list[str]:
    """Name the layers of a module: children in a dict that end in a number, and several attributes
    that differ in the number only."""
    stems = {}
    for key, _ in module.named_children():
        if key[-1:].isdigit():
            stems[key] = key.rstrip("0123456789")
    # A single such attribute is no stack: a model may be called `gpt2`.
    counts = Counter(stems.values())
    is_dict = isinstance(module, nn.ModuleDict)
    return [key for key, stem in stems.items() if is_dict or counts[stem] > 1]


def keeps_its_scale(module: nn.Module) -> bool:
    """Say whether a module is an embedding, a norm, or a convolution over tokens."""
    # transformers has a class of norm for each architecture.
    norm = "norm" in type(module).__name__.lower()
    return norm or isinstance(module, nn.Embedding | nn.Conv1d)
