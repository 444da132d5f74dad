"""A state says what it holds: every verb of every residual takes the states it can take, and names the others."""

import re
import threading

import pytest
import torch

from headwater.residuals import build, names, record
from headwater.residuals.base import hold_weights, weights_held

SPECS = [
    *names(),
    "attnres-full:window=2",
    "attnres-block:block=3,schedule=two-phase,backend=reference",
    "attnres-full:schedule=two-phase,backend=reference",
    "ddl:width=2,compress=channel",
    "ddl:width=2,compress=token,expand=token",
    "denseformer:dilation=2,period=2",
    "laurel:form=previous",
    "deepcrossattention:last=1",
    "elc-bert:variant=base",
    "hyper-connections:streams=1",
    "delta-attnres:block=3",
]


def begun(spec, sublayers=8):
    torch.manual_seed(0)
    return build(spec, 16, sublayers), torch.randn(2, 3, 16)


@pytest.mark.parametrize("spec", SPECS)
def test_the_table_has_the_number_of_tensors_of_every_state(spec):
    residual, x = begun(spec)
    state = residual.begin(x)
    for i in range(residual.sublayers):
        assert len(state) in {len(layout) for layout in residual.layouts["read", i]}
        read, state = residual.read(state, i)
        assert len(state) in {len(layout) for layout in residual.layouts["write", i]}
        state = residual.write(state, i, torch.tanh(read[0] if isinstance(read, tuple) else read))
    assert len(state) in {len(layout) for layout in residual.layouts["read", residual.sublayers]}
    residual.end(state)


@pytest.mark.parametrize("spec", SPECS)
def test_misuse_is_an_error(spec):
    residual, x = begun(spec)
    state = residual.begin(x)
    _, reading = residual.read(state, 0)
    written = residual.write(reading, 0, x)
    with pytest.raises(ValueError, match=r"write 0 .*next verb is read 0"):
        residual.write(state, 0, x)
    with pytest.raises(ValueError, match=r"read 1 .*next verb is write 0"):
        residual.read(reading, 1)  # the result of write 0 was dropped
    with pytest.raises(ValueError, match=r"read 1 .*next verb is read 0"):
        residual.read(state, 1)
    with pytest.raises(ValueError, match=r"end .*next verb is read 1"):
        residual.end(written)
    for wrong in (99, -1, "0", torch.tensor(0)):
        with pytest.raises(
            ValueError, match=rf"connects 8 sublayers, 0 to 7; got {re.escape(repr(wrong))}"
        ):
            residual.read(tuple(state), wrong)
    with pytest.raises(
        ValueError, match=r"read 0 of .* takes a state of \d+ tensors? .*; got \d+: \(2, 3, 16\)"
    ):
        residual.read((x,) * 99, 0)
    with pytest.raises(
        ValueError,
        match=r"read 0 of .* takes a state, which `begin` makes of a tensor; got a tensor",
    ):
        residual.read(x, 0)
    with pytest.raises(
        ValueError, match=r"write 0 of .* got a tuple of .*: read, state = residual\.read"
    ):
        residual.write(residual.read(state, 0), 0, x)
    with pytest.raises(
        ValueError, match=r"begin of .* takes one tensor whose last axis is dim=16; got \(2, 3, 8\)"
    ):
        residual.begin(x[..., :8])
    with pytest.raises(
        TypeError,
        match=r"a residual is not called, and '.*' was: state = begin\(x\), then for each",
    ):
        residual(x)
    with pytest.raises(
        ValueError, match=r"write 0 of .* takes one tensor whose last axis is dim=16; got a tuple"
    ):
        residual.write(reading, 0, (x, None))  # what an attention of transformers returns
    for wrong in (x[:, :1], x[:1], x[0], x[0, 0]):  # what could be added all the same
        got = re.escape(str(tuple(wrong.shape)))
        with pytest.raises(
            ValueError, match=rf"write 0 of .* of the shape that was read, \(2, 3, 16\); got {got}$"
        ):
            residual.write(reading, 0, wrong)


@pytest.mark.parametrize("spec", SPECS)
def test_one_sublayer_more_than_were_named_is_an_error(spec):
    """The state that `end` takes is none to read for a sublayer."""
    residual, x = begun(spec)
    state = residual.begin(x)
    for i in range(8):
        state = residual.write(residual.read(state, i)[1], i, x)
    with pytest.raises(ValueError, match=r"connects 8 sublayers, 0 to 7; got 8"):
        residual.read(state, 8)


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_alone_are_a_state_too(spec):
    """What crossed a stage, a checkpoint of activations or the compiler is a plain tuple."""
    residual, x = begun(spec)
    placed, plain = residual.begin(x), tuple(residual.begin(x))
    for i in range(residual.sublayers):
        (_, placed), (_, plain) = residual.read(placed, i), residual.read(tuple(plain), i)
        placed, plain = residual.write(placed, i, x), residual.write(tuple(plain), i, x)
    assert torch.equal(residual.end(placed), residual.end(tuple(plain)))


def test_a_state_that_is_no_tuple_is_named(monkeypatch):
    residual, x = begun("standard")
    monkeypatch.setattr(type(residual), "_write", lambda self, state, i, y: state[0] + y)
    with pytest.raises(TypeError, match=r"state is a tuple of tensors, .*: return \(x,\)"):
        residual.write(residual.read(residual.begin(x), 0)[1], 0, x)


def test_what_one_thread_looks_at_another_does_not_see():
    residual, x = begun("attnres-full")
    seen = {}

    def elsewhere():
        seen["held"] = weights_held()
        _, state = residual.read(residual.begin(x), 0)
        seen["read"] = residual.read(residual.write(state, 0, x), 1)[0]

    with hold_weights(), record(residual) as trace:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert weights_held()
    assert not weights_held()
    assert seen["held"] is False
    assert seen["read"].requires_grad, "its weights were not held"
    assert not trace.sources
    assert not trace.reads


def test_recordings_nest_and_leave_the_residual_as_it_was():
    residual, x = begun("standard", 1)
    attributes = dict(residual.__dict__)
    with record(residual) as outer:
        with record(residual) as inner:
            residual.begin(x)
        residual.begin(x)
    residual.begin(x)
    assert (len(inner.sources), len(outer.sources)) == (1, 1)
    assert residual.__dict__.keys() - {"layouts", "_lengths"} == attributes.keys()
