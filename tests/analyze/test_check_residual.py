"""The check that authors of residuals run: the package's own pass it, and each mistake is named with its method."""

import pytest
import torch
from outside import without_plugins
from torch import nn

from headwater.analyze import check_residual
from headwater.cli import main
from headwater.residuals import Residual, StandardResidual, StreamResidual, names, register


@pytest.mark.parametrize("spec", [*names(), "attnres-block:block=3,heads=4", "laurel:form=previous"])
def test_our_own_residuals_pass(spec):
    found = check_residual(spec)
    assert len(found) == 9
    assert not {name: wrong for name, wrong in found.items() if wrong}


class Bare(Residual):
    def _begin(self, x):
        return (x,)

    def _write(self, state, i, y):
        return (state[0] + y,)


class Unsaid(StreamResidual):
    def _write(self, state, i, y):
        return (state[0] + y,)


class Wide(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        raise ValueError(f"{dim} is too wide")


class Narrow(StandardResidual):
    def _end(self, state, norm):
        return state[0][..., :-1]


class Heads(StandardResidual):
    def _weights(self, state, i):
        return torch.ones(1, *state[0].shape[:-1])


class Lost(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + {}[i],)


class Longer(StandardResidual):
    def _write(self, state, i, y):
        return (state[0], y)


class Silent(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gains = nn.ParameterDict({str(i): nn.Parameter(torch.ones(1)) for i in range(sublayers)})

    def _write(self, state, i, y):
        return (state[0] + (self.gains[str(i)] if i else 1) * y,)


class Endless(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gain = nn.Parameter(torch.ones(1))

    def _write(self, state, i, y):
        return (state[0] + y * (self.gain * 0).sqrt().add(1),)  # 0 times an infinite slope


class InPlace(StandardResidual):
    def _write(self, state, i, y):
        return (state[0].add_(y),)


class Remembers(StandardResidual):
    def _write(self, state, i, y):
        self.last = y if i == 0 else self.last
        return (state[0] + y + self.last,)


class Half(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + 0.5 * y,)


class Loose(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + state[0].mean(-1, keepdim=True).sigmoid() * y,)


class Neighbours(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + y.cumsum(-2),)


class Drawn(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.scale = torch.rand(dim) + 0.5

    def _write(self, state, i, y):
        return (state[0] + self.scale * y,)


class Rounds(StandardResidual):
    def _read(self, state, i, norm):
        one = torch.ones_like(state[0])
        return state[0] * (1e-3 / ((one + 1e-3) - 1)), state


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Bare, "methods", "the class lacks _end, _read, _weights, layout"),
        (Unsaid, "methods", "at_start must be one of exact, scaled, different; got None"),
        (Wide, "methods", "in __init__: ValueError: 32 is too wide"),
        (Narrow, "shapes", "_end gives (2, 3, 31) for a stream of (2, 3, 32)"),
        (Heads, "shapes", "_weights of read 0 gives (1, 2, 3), not (N, ..., H) for (2, 3, 32)"),
        (Lost, "shapes", "in _write: KeyError: 0"),
        (Longer, "shapes", "read 1 of 'broken' takes a state of 1 tensors (stream); got 2"),
        (InPlace, "states", "_write changes in place what it was given"),
        (Remembers, "states", "two passes at a time disturb each other"),
        (Silent, "gradients", "no gradient reaches gains.0: "),
        (Endless, "gradients", "the gradient of gain is not finite"),
        (Half, "start", "at_start says 'exact', and against the plain residual it starts as 'different'"),
        (Loose, "maps", "the mixing matrix does not give back read 1: weights"),
        (Neighbours, "cache", "decoding from a cache differs from a whole pass by "),
        (Drawn, "loading", "a saved and loaded model differs by "),
        (Rounds, "bf16", "_read of sublayer 0 is not finite"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_named_by_its_check(cls, check, message):
    with without_plugins():
        register("broken")(cls)
        found = check_residual("broken")
    assert message in found[check]
    assert len(found) == (1 if check == "methods" else 9)


def test_the_draws_of_a_caller_stay_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_residual("ddl")
    assert torch.equal(torch.rand(1), expected)


def test_the_command_has_a_line_for_each_check(capsys):
    with without_plugins():
        register("broken")(InPlace)
        assert main(["residuals", "--check", "standard", "broken"]) == 1
    said = capsys.readouterr()
    fine, broken = said.out.split("broken\n")
    assert fine.splitlines()[0] == "standard"
    assert [line.split() for line in fine.splitlines()[1:]] == [[name, "ok"] for name in check_residual("standard")]
    assert "  states     _write changes in place what it was given: make a new tensor\n" in broken
    assert "must be mended: the lines without ok" in said.err
    assert main(["residuals", "--check", "standard"]) == 0
    assert main(["residuals", "--check", "standrad"]) == 1
    assert "unknown residual 'standrad'" in capsys.readouterr().err
