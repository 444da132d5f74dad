# mypy: allow-untyped-defs
"""Register functions that torch.compile, fake tensors and dispatch modes see as one node."""

from collections.abc import Callable, Sequence

import torch

from headwater._torch import traced

_library = torch.library.Library("headwater", "FRAGMENT")


class Operator:
    """A function on tensors, registered as headwater::name with a fake kernel.

    Calls go through PyTorch's dispatcher where something traces them (torch.compile, fake tensors,
    any dispatch mode), and straight to the function otherwise: for kernels of a hundred
    microseconds the dispatcher's Python costs as much.
    """

    def __init__(
        self,
        function: Callable,
        fake: Callable,
        mutates: Sequence[str] = (),
    ) -> None:
        name = function.__name__
        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"headwater::{name}", fake, lib=_library)
        self.function = function
        self.overload = getattr(torch.ops.headwater, name).default

    def __call__(self, *args):
        return (self.overload if traced() else self.function)(*args)

    def differentiate(self, backward: Callable, keep: Callable) -> None:
        """Give the node itself the gradient of the autograd function around it.

        torch.export leaves that function out.
        """
        name = f"headwater::{self.function.__name__}"
        torch.library.register_autograd(name, backward, setup_context=keep, lib=_library)


class Writer(Operator):
    """An operator that returns nothing: it writes to its last arguments, which `allocate` makes.

    Callers leave these arguments out and get them back. If an operator returned several tensors,
    inductor would keep all of them until it has fetched each, a weight's gradient for instance at
    the end of the backward, and would not know that it does: a compiled step took more memory than
    an eager one. Inductor frees tensors that it allocates itself one by one.
    """

    def __init__(
        self, function: Callable, allocate: Callable, writes: Sequence[str], adds_to: Sequence[str]
    ) -> None:
        super().__init__(function, lambda *_: None, [*adds_to, *writes])
        self.allocate = allocate

    def __call__(self, *args):
        outputs = self.allocate(*args)
        (self.overload if traced() else self.function)(*args, *outputs)
        return outputs


def operator(fake: Callable) -> Callable[[Callable], Operator]:
    """Register a function. `fake` returns tensors of the same shapes for the same arguments."""
    return lambda function: Operator(function, fake)


def writer(
    allocate: Callable, writes: Sequence[str], adds_to: Sequence[str] = ()
) -> Callable[[Callable], Writer]:
    """Register a function that writes to its last arguments, `writes`.

    `allocate` makes these from the other arguments. The function also changes `adds_to` of those.
    """
    return lambda function: Writer(function, allocate, writes, adds_to)
