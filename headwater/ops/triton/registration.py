# mypy: allow-untyped-defs
"""Functions that torch.compile, fake tensors and dispatch modes see as one node."""

from collections.abc import Callable, Sequence

import torch

from headwater._torch import traced

_library = torch.library.Library("headwater", "FRAGMENT")


class Operator:
    """A function on tensors, registered as headwater::name with a fake kernel.

    Calls go through PyTorch's dispatcher where something traces them (torch.compile, fake tensors, any dispatch mode),
    and straight to the function otherwise: for kernels of a hundred microseconds the dispatcher's Python costs as much.
    """

    def __init__(self, name: str, function: Callable, fake: Callable, mutates: Sequence[str]) -> None:
        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"headwater::{name}", fake, lib=_library)
        self.function = function
        self.overload = getattr(torch.ops.headwater, name).default

    def __call__(self, *args):
        if traced():
            return self.overload(*args)
        return self.function(*args)


def operator(fake: Callable, mutates: Sequence[str] = ()) -> Callable[[Callable], Operator]:
    return lambda function: Operator(function.__name__, function, fake, mutates)
