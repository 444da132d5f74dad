"""The check that authors of residuals run: the package's own pass it, and each mistake is named with its method."""

import pytest
import torch
from outside import without_plugins
from torch import nn

from headwater.analyze import check_residual
from headwater.analyze.contract import norms, states
from headwater.cli import main
from headwater.residuals import Residual, StandardResidual, StreamResidual, names, register
from headwater.residuals.base import apply_norm

OPTIONS = [
    "attnres-block:block=3,heads=4",
    "laurel:form=previous",
    "hyper-connections:streams=3,form=static",  # a factor on the first read, which a norm would cancel
    "depth-window:maps=shared",  # no pipeline cuts it
    "attnres-full:window=8",
]


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_our_own_residuals_pass(spec):
    outcomes = check_residual(spec)
    assert len(outcomes) == 12
    assert not {name: wrong for name, wrong in outcomes.items() if wrong}


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


class LastHeads(StandardResidual):
    def _weights(self, state, i):
        return torch.ones(1, *state[0].shape[:-1], *([1] if i < self.sublayers else []))


class Lost(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + {}[i],)


class Typo(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + self.gian * y,)


class Own(StandardResidual):
    class Error(Exception):
        pass

    def _write(self, state, i, y):
        raise self.Error("not today")


class Chanel(StandardResidual):
    mixes = "chanel"


class Lower(StandardResidual):
    def _begin(self, x):
        return (x.half(),)


class Pair(StandardResidual):
    def _read(self, state, i, norm):
        return (state[0], state[0]), state


class Alone(StandardResidual):
    def _read(self, state, i, norm):
        return apply_norm(norm, state[0])


class Tupled(StandardResidual):
    def _end(self, state, norm):
        return (state[0],)


class Raw(StandardResidual):
    def _read(self, state, i, norm):
        return (state[0] if i == 5 else apply_norm(norm, state[0])), state


class RawEnd(StandardResidual):
    def _end(self, state, norm):
        return state[0]


class Chance(StandardResidual):
    def _read(self, state, i, norm):
        return apply_norm(norm, state[0] * (1 + torch.rand(()))), state


class RemembersReads(StandardResidual):
    def _read(self, state, i, norm):
        self.seen = state[0] if i == 2 else getattr(self, "seen", state[0])
        return apply_norm(norm, state[0] + self.seen if i == 3 else state[0]), state


class Listed(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(sublayers)])

    def _write(self, state, i, y):
        return (state[0] + self.gains[i] * y,)


class Shared(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gain = nn.Parameter(torch.ones(()))

    def _write(self, state, i, y):
        return (state[0] + self.gain * y,)


class Elsewhere(StandardResidual):
    def keep_only(self, start, stop):
        self.first = start

    def _read(self, state, i, norm):
        return apply_norm(norm, state[0]), (
            state[0] * (2 if i == getattr(self, "first", 0) else 1),
        )


class LeftBehind(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gain = torch.ones(dim)

    def _write(self, state, i, y):
        return (state[0] + self.gain * y,)


class Undefined(StandardResidual):
    def _write(self, state, i, y):
        return (state[0] + y * float("nan"),)


class Dropout(StandardResidual):
    """Right: not a mistake."""

    def _read(self, state, i, norm):
        return apply_norm(norm, nn.functional.dropout(state[0], 0.1, self.training)), state


class Longer(StandardResidual):
    def _write(self, state, i, y):
        return (state[0], y)


class LongerBegin(StandardResidual):
    def _begin(self, x):
        return (x, x)


class LongerRead(StandardResidual):
    def _read(self, state, i, norm):
        return state[0], (*state, state[0])


class Silent(StandardResidual):
    def __init__(self, dim, sublayers):
        super().__init__(dim, sublayers)
        self.gains = nn.ParameterDict(
            {str(i): nn.Parameter(torch.ones(1)) for i in range(sublayers)}
        )

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


class Keeps(StandardResidual):
    def _write(self, state, i, y):
        self.last = y
        return (state[0] + y,)


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


class Short(StandardResidual):
    def _write(self, state, i, y):
        if y.shape[-2] > 2:
            raise ValueError("texts are short")
        return (state[0] + y,)


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
        (Chanel, "methods", "mixes must be one of scalar, channel, operator; got 'chanel'"),
        (Typo, "shapes", "in _write: AttributeError: 'Typo' object has no attribute 'gian'"),
        (Own, "shapes", "in _write: Error: not today"),
        (
            Lower,
            "shapes",
            "_read of sublayer 0 gives (3, 2, 32) of torch.float16 for a stream of (3, 2, 32) of torch",
        ),
        (
            Pair,
            "shapes",
            "_read of sublayer 0 gives 2 tensors: one, or three for query, key and value",
        ),
        (Alone, "shapes", "in read: ValueError: too many values to unpack"),
        (Tupled, "shapes", "_end gives a tuple, not a tensor"),
        (Undefined, "shapes", "_read of sublayer 1 is not finite"),
        (Raw, "norms", "_read of sublayer 5 does not apply the norm that it is given"),
        (RawEnd, "norms", "_end does not apply the norm that it is given"),
        (Chance, "states", "the same pass gives something else the second time"),
        (RemembersReads, "states", "two passes at a time disturb each other"),
        (
            Listed,
            "stages",
            "in keep_only: TypeError: 'broken' keeps 'gains' outside of a dict keyed by sublayer",
        ),
        (Shared, "stages", "both stages of a pipeline keep gain: "),
        (Elsewhere, "stages", "cut before sublayer 4, as a pipeline does, it ends "),
        (LeftBehind, "device", "in _write: RuntimeError: "),
        (
            Narrow,
            "shapes",
            "_end gives (3, 2, 31) of torch.float32 for a stream of (3, 2, 32) of torch.float32",
        ),
        (Heads, "shapes", "_weights of read 0 gives (1, 3, 2), not (N, ..., H) for (3, 2, 32)"),
        (LastHeads, "shapes", "_weights of read 8 gives (1, 3, 2), not (N, ..., H)"),
        (Lost, "shapes", "in _write: KeyError: 0"),
        (
            Longer,
            "shapes",
            "_write of sublayer 0 gives a state of 2 tensors, and layout(1) names ('stream',)",
        ),
        (
            LongerBegin,
            "shapes",
            "_begin gives a state of 2 tensors, and layout(0) names ('stream',)",
        ),
        (
            LongerRead,
            "shapes",
            "_read of sublayer 0 gives a state of 2 tensors, and layout(0) names ('stream',)",
        ),
        (InPlace, "states", "_write changes in place what it was given"),
        (Remembers, "states", "two passes at a time disturb each other"),
        (Keeps, "states", "a pass sets last of self: what a pass needs belongs into the state"),
        (Silent, "gradients", "no gradient reaches gains.0: "),
        (Endless, "gradients", "the gradient of gain is not finite"),
        (
            Half,
            "start",
            "at_start says 'exact', and against the plain residual it starts as 'different'",
        ),
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
        outcomes = check_residual("broken")
    assert message in outcomes[check]
    assert len(outcomes) == {"methods": 1, "shapes": 2, "states": 4}.get(
        check, 12
    )  # what follows is not said again


def test_dropout_is_no_mistake():
    with without_plugins():
        register("right")(Dropout)
        assert not any(check_residual("right").values())


def test_nothing_is_said_to_be_changed_where_it_is_not_a_number():
    with without_plugins():
        register("broken")(Undefined)
        assert states("broken") == norms("broken") == ""


def test_the_draws_of_a_caller_stay_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_residual("ddl")
    assert torch.equal(torch.rand(1), expected)


def test_the_command_takes_all_that_are_known(capsys, monkeypatch):
    monkeypatch.setattr("headwater.analyze.contract.check_residual", lambda spec: {"methods": ""})
    assert main(["residuals", "--check"]) == 0
    assert capsys.readouterr().out == "".join(f"{name}\n  methods    ok\n" for name in names())


def test_the_command_has_a_line_for_each_check(capsys):
    with without_plugins():
        register("broken")(InPlace)
        assert main(["residuals", "--check", "standard", "broken"]) == 1
    output = capsys.readouterr()
    fine, broken = output.out.split("broken\n")
    assert fine.splitlines()[0] == "standard"
    assert [line.split() for line in fine.splitlines()[1:]] == [
        [name, "ok"] for name in check_residual("standard")
    ]
    assert "  states     _write changes in place what it was given: make a new tensor\n" in broken
    assert output.err.endswith(
        "must be mended: the lines without ok. The checks that are missing follow then\n"
    )
    assert main(["residuals", "--check", "standard"]) == 0
    assert main(["residuals", "--check", "standrad"]) == 1
    assert "unknown residual 'standrad'" in capsys.readouterr().err


def test_checks_that_could_not_be_made_are_promised(capsys):
    with without_plugins():
        register("broken")(Bare)
        assert main(["residuals", "--check", "broken", "standard"]) == 1
    assert capsys.readouterr().err.endswith("without ok. The checks that are missing follow then\n")


def test_a_fault_of_several_checks_is_told_once(capsys):
    with without_plugins():
        register("broken")(Short)
        assert main(["residuals", "--check", "broken"]) == 1
    output = capsys.readouterr()
    assert output.out.count("in _write: ValueError: texts are short") == 1
    assert "  gradients  in _write: ValueError: texts are short\n" in output.out
    assert "  maps       as gradients\n  cache      as gradients\n" in output.out
    assert output.err.startswith("headwater: 1 of these must be mended: ")
