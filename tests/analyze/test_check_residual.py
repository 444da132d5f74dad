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


def stream(**methods):
    """A plain residual with other methods."""
    return type("Broken", (StandardResidual,), methods)


def writes(added):
    """A plain residual that adds something else: `added` of the state, the sublayer and its output."""

    def _write(self, state, i, y):
        return (state[0] + added(self, state[0], i, y),)

    return _write


def reads(change):
    """A plain residual that reads something else of the stream."""

    def _read(self, state, i, norm):
        return apply_norm(norm, change(self, state[0], i)), state

    return _read


def starts(**attributes):
    """An __init__ that sets attributes, by their functions of the width."""

    def __init__(self, dim, sublayers):
        StandardResidual.__init__(self, dim, sublayers)
        for name, make in attributes.items():
            setattr(self, name, make(dim))

    return __init__


class Bare(Residual):
    def _begin(self, x):
        return (x,)

    def _write(self, state, i, y):
        return (state[0] + y,)


class Unsaid(StreamResidual):
    _write = Bare._write


def too_wide(dim):
    raise ValueError(f"{dim} is too wide")


def remember_read(residual, x, i):
    residual.seen = x if i == 2 else getattr(residual, "seen", x)
    return x + residual.seen if i == 3 else x


def remember_first(residual, x, i, y):
    residual.last = y if i == 0 else residual.last
    return y + residual.last


def keep_last(residual, x, i, y):
    residual.last = y
    return y


def keep_start(self, start, stop):
    self.first = start


def twice_at_the_start(self, state, i, norm):
    factor = 2 if i == getattr(self, "first", 0) else 1
    return apply_norm(norm, state[0]), (state[0] * factor,)


def short_texts(residual, x, i, y):
    if y.shape[-2] > 2:
        raise ValueError("texts are short")
    return y


def one(dim):
    return nn.Parameter(torch.ones(1))


def gains(dim):
    return nn.ParameterDict({str(i): one(dim) for i in range(8)})


IN_PLACE = stream(_write=lambda self, state, i, y: (state[0].add_(y),))
UNDEFINED = stream(_write=writes(lambda residual, x, i, y: y * float("nan")))
SHORT = stream(_write=writes(short_texts))
# By the name of the check: residuals with a mistake, and the message.
MISTAKES = {
    "methods": [
        (Bare, "the class lacks _end, _read, _weights, layout"),
        (Unsaid, "at_start must be one of exact, scaled, different; got None"),
        (stream(__init__=starts(wide=too_wide)), "in __init__: ValueError: 32 is too wide"),
    ],
    "shapes": [
        (
            stream(_begin=lambda self, x: (x.half(),)),
            "_read of sublayer 0 gives (3, 2, 32) of torch.float16 for a stream of (3, 2, 32) of",
        ),
        (
            stream(_read=lambda self, state, i, norm: ((state[0], state[0]), state)),
            "_read of sublayer 0 gives 2 tensors: one, or three for query, key and value",
        ),
        (
            stream(_read=lambda self, state, i, norm: state[0]),
            "in read: ValueError: too many values to unpack",
        ),
        (
            stream(_end=lambda self, state, norm: (state[0],)),
            "_end gives a tuple, not a tensor",
        ),
        (
            stream(_end=lambda self, state, norm: state[0][..., :-1]),
            "_end gives (3, 2, 31) of torch.float32 for a stream of (3, 2, 32) of torch.float32",
        ),
        (UNDEFINED, "_read of sublayer 1 is not finite"),
        (
            stream(_weights=lambda self, state, i: torch.ones(1, *state[0].shape[:-1])),
            "_weights of read 0 gives (1, 3, 2), not (N, ..., H) for (3, 2, 32)",
        ),
        (stream(_write=writes(lambda residual, x, i, y: {}[i])), "in _write: KeyError: 0"),
        (
            stream(_write=lambda self, state, i, y: (state[0], y)),
            "_write of sublayer 0 gives a state of 2 tensors, and layout(1) names ('stream',)",
        ),
        (
            stream(_read=lambda self, state, i, norm: (state[0], (*state, state[0]))),
            "_read of sublayer 0 gives a state of 2 tensors, and layout(0) names ('stream',)",
        ),
    ],
    "norms": [
        (
            stream(
                _read=lambda self, state, i, norm: (
                    state[0] if i == 5 else apply_norm(norm, state[0]),
                    state,
                )
            ),
            "_read of sublayer 5 does not apply the norm that it is given",
        ),
        (
            stream(_end=lambda self, state, norm: state[0]),
            "_end does not apply the norm that it is given",
        ),
    ],
    "states": [
        (
            stream(_read=reads(lambda residual, x, i: x * (1 + torch.rand(())))),
            "the same pass gives something else the second time",
        ),
        (stream(_read=reads(remember_read)), "two passes at a time disturb each other"),
        (stream(_write=writes(remember_first)), "two passes at a time disturb each other"),
        (IN_PLACE, "_write changes in place what it was given"),
        (stream(_write=writes(keep_last)), "a pass sets last of self: what a pass needs belongs"),
    ],
    "gradients": [
        (
            stream(
                __init__=starts(gains=gains),
                _write=writes(lambda residual, x, i, y: (residual.gains[str(i)] if i else 1) * y),
            ),
            "no gradient reaches gains.0: ",
        ),
        (
            # 0 times an infinite slope
            stream(
                __init__=starts(gain=one),
                _write=writes(lambda residual, x, i, y: y * (residual.gain * 0).sqrt().add(1)),
            ),
            "the gradient of gain is not finite",
        ),
    ],
    "start": [
        (
            stream(_write=writes(lambda residual, x, i, y: 0.5 * y)),
            "at_start says 'exact', and against the plain residual it starts as 'different'",
        )
    ],
    "maps": [
        (
            stream(_write=writes(lambda residual, x, i, y: x.mean(-1, keepdim=True).sigmoid() * y)),
            "the mixing matrix does not give back read 1: weights",
        )
    ],
    "cache": [
        (
            stream(_write=writes(lambda residual, x, i, y: y.cumsum(-2))),
            "decoding from a cache differs from a whole pass by ",
        )
    ],
    "loading": [
        (
            stream(
                __init__=starts(scale=lambda dim: torch.rand(dim) + 0.5),
                _write=writes(lambda residual, x, i, y: residual.scale * y),
            ),
            "a saved and loaded model differs by ",
        )
    ],
    "stages": [
        (
            stream(
                __init__=starts(gains=lambda dim: nn.ParameterList([one(dim) for _ in range(8)])),
                _write=writes(lambda residual, x, i, y: residual.gains[i] * y),
            ),
            "in keep_only: TypeError: 'broken' keeps 'gains' outside of a dict keyed by sublayer",
        ),
        (
            stream(
                __init__=starts(gain=one),
                _write=writes(lambda residual, x, i, y: residual.gain * y),
            ),
            "both stages of a pipeline keep gain: ",
        ),
        (
            stream(keep_only=keep_start, _read=twice_at_the_start),
            "cut before sublayer 4, as a pipeline does, it ends ",
        ),
    ],
    "device": [
        (
            stream(
                __init__=starts(gain=torch.ones),
                _write=writes(lambda residual, x, i, y: residual.gain * y),
            ),
            "in _write: RuntimeError: ",
        )
    ],
    "bf16": [
        (
            stream(
                _read=reads(lambda residual, x, i: x * (1e-3 / ((torch.ones_like(x) + 1e-3) - 1))),
            ),
            "_read of sublayer 0 is not finite",
        )
    ],
}


@pytest.mark.parametrize(
    ("check", "cls", "message"),
    [(check, *mistake) for check, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_is_named_by_its_check(check, cls, message):
    with without_plugins():
        register("broken")(cls)
        outcomes = check_residual("broken")
    assert message in outcomes[check]
    # A check that others need is the last one if it fails.
    assert len(outcomes) == {"methods": 1, "shapes": 2, "states": 4}.get(check, 12)


def test_dropout_is_no_mistake_and_nothing_changes_where_it_is_not_a_number():
    with without_plugins():
        dropped = reads(lambda residual, x, i: nn.functional.dropout(x, 0.1, residual.training))
        register("right")(stream(_read=dropped))
        assert not any(check_residual("right").values())
        register("broken")(UNDEFINED)
        assert states("broken") == norms("broken") == ""


def test_the_draws_of_a_caller_stay_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_residual("ddl")
    assert torch.equal(torch.rand(1), expected)


def checked(capsys, cls, *specs):
    """Return the lines and the message of the command for specs, one of them `broken`."""
    with without_plugins():
        register("broken")(cls)
        assert main(["residuals", "--check", *specs]) == 1
    output = capsys.readouterr()
    return output.out, output.err


def test_the_command_has_a_line_for_each_check(capsys):
    out, message = checked(capsys, IN_PLACE, "standard", "broken")
    fine, broken = out.split("broken\n")
    lines = [line.split() for line in fine.splitlines()]
    assert lines == [["standard"], *([name, "ok"] for name in check_residual("standard"))]
    assert "  states     _write changes in place what it was given: make a new tensor\n" in broken
    assert message.endswith("do not say ok. The missing checks run once the others pass\n")
    # A fault of several checks is told once.
    out, message = checked(capsys, SHORT, "broken")
    assert out.count("in _write: ValueError: texts are short") == 1
    assert "  maps       as gradients\n  cache      as gradients\n" in out
    assert message == "headwater: 1 check failed. Fix the lines above that do not say ok\n"


def test_the_command_takes_all_that_are_known(capsys, monkeypatch):
    monkeypatch.setattr("headwater.analyze.contract.check_residual", lambda spec: {"methods": ""})
    assert main(["residuals", "--check"]) == 0
    assert capsys.readouterr().out == "".join(f"{name}\n  methods    ok\n" for name in names())
