# mypy: allow-untyped-defs
"""Functions that torch.compile, fake tensors and dispatch modes see as one node."""

import inspect
from collections.abc import Callable, Sequence

import torch

from headwater._torch import traced

_library = torch.library.Library("headwater", "FRAGMENT")


class Operator:
    """A function on tensors, registered as headwater::name with a fake kernel.

    Calls go through PyTorch's dispatcher where something traces them (torch.compile, fake tensors, any dispatch mode),
    and straight to the function otherwise: for kernels of a hundred microseconds the dispatcher's Python costs as much.
    """

    def __init__(self, function: Callable, fake: Callable, mutates: Sequence[str] = ()) -> None:
        name = function.__name__
        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"headwater::{name}", fake, lib=_library)
        self.function = function
        self.overload = getattr(torch.ops.headwater, name).default

    def __call__(self, *args):
        return (self.overload if traced() else self.function)(*args)

    def differentiate(self, backward: Callable, keep: Callable) -> None:
        """Give the node by itself the gradient of the autograd function around it, which torch.export leaves out."""
        name = f"headwater::{self.function.__name__}"
        torch.library.register_autograd(name, backward, setup_context=keep, lib=_library)


class Writer(Operator):
    """An operator that returns nothing: it writes to the last of its arguments, which `allocate` makes of the others.

    Callers leave them out and get them back. Of an operator that returned several tensors, inductor would keep all
    until it has fetched each, a weight's gradient for instance at the end of the backward, and would not know that it
    does: a compiled step took more memory than an eager one. Tensors that it allocates itself it frees one by one.
    """

    def __init__(self, function: Callable, allocate: Callable, adds_to: Sequence[str]) -> None:
        written = list(inspect.signature(function).parameters)[
            len(inspect.signature(allocate).parameters) :
        ]
        super().__init__(function, lambda *_: None, [*adds_to, *written])
        self.allocate = allocate

    def __call__(self, *args):
        outputs = self.allocate(*args)
        (self.overload if traced() else self.function)(*args, *outputs)
        return outputs


def operator(fake: Callable) -> Callable[[Callable], Operator]:
    """Register a function that returns what `fake`, called with the same arguments, has the shapes of."""
    return lambda function: Operator(function, fake)


def writer(allocate: Callable, adds_to: Sequence[str] = ()) -> Callable[[Callable], Writer]:
    """Register a function that writes to what `allocate` makes; `adds_to`: arguments that it changes besides."""
    return lambda function: Writer(function, allocate, adds_to)
