"""A state says what it holds: verbs take the states that they can take, and name the others."""

import threading

import pytest
import torch
from tinymodels import advance, inputs_of

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

    def assert_laid_out(state, verb, i):
        assert len(state) in map(len, residual.layouts[verb, i])

    state = residual.begin(x)
    for i in range(residual.sublayers):
        assert_laid_out(state, "read", i)
        read, state = residual.read(state, i)
        assert_laid_out(state, "write", i)
        state = residual.write(state, i, torch.tanh(inputs_of(read)[0]))
    assert_laid_out(state, "read", residual.sublayers)


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_in_the_wrong_place_is_an_error_that_names_both_places(spec):
    residual, x = begun(spec)
    state = residual.begin(x)
    _, reading = residual.read(state, 0)
    written = residual.write(reading, 0, x)
    for verb, arguments, place, came in (
        (residual.write, (state, 0, x), "write 0", "read 0"),
        (residual.read, (reading, 1), "read 1", "write 0"),  # the result of write 0 was dropped
        (residual.read, (state, 1), "read 1", "read 0"),
        (residual.end, (written,), "end", "read 1"),
    ):
        with pytest.raises(ValueError, match=f"^{place} of .* got the state for {came}$"):
            verb(*arguments)
    for number in (99, -1, "0", torch.tensor(0)):
        with pytest.raises(ValueError, match=r"connects 8 sublayers, 0 to 7"):
            residual.read(tuple(state), number)


@pytest.mark.parametrize("spec", SPECS)
def test_other_values_are_an_error_that_names_what_came(spec):
    residual, x = begun(spec)
    state = residual.begin(x)
    _, reading = residual.read(state, 0)
    for wrong, came in (
        ((x,) * 99, r"99: \(2, 3, 16\)"),
        (x, "a Tensor that is no tuple of tensors"),
        (residual.read(state, 0), "a tuple that is no tuple of tensors"),  # of the read too
    ):
        with pytest.raises(ValueError, match=rf"^read 0 of .* \d+ tensors \(.*\); got {came}"):
            residual.read(wrong, 0)
    with pytest.raises(ValueError, match=r"^begin of .* tensor \(\.\.\., 16\); got \(2, 3, 8\)$"):
        residual.begin(x[..., :8])
    # What an attention of transformers returns, and what could be added all the same.
    narrow = x[:, :1], x[:1], x[0], x[0, 0]
    for wrong in ((x, None), *narrow):
        with pytest.raises(ValueError, match=r"^write 0 of .* one tensor \(2, 3, 16\); got "):
            residual.write(reading, 0, wrong)


@pytest.mark.parametrize("spec", SPECS)
def test_one_sublayer_more_than_were_named_is_an_error(spec):
    """The state that `end` takes is none to read for a sublayer."""
    residual, x = begun(spec)
    state = advance(residual, residual.begin(x), lambda i, _: x)
    with pytest.raises(ValueError, match=r"connects 8 sublayers, 0 to 7; got 8"):
        residual.read(state, 8)


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_alone_are_a_state_too(spec):
    """A plain tuple is what crossed a stage, a checkpoint of activations or the compiler.

    Whoever moves or casts what a layer takes makes type(state)(...) of its tensors.
    """
    residual, x = begun(spec)
    state = residual.begin(x)
    plain = type(state)(tensor.clone() for tensor in state)
    for i in range(residual.sublayers):
        assert type(plain) is tuple
        plain = tuple(residual.read(plain, i)[1])
        plain = tuple(residual.write(plain, i, x))
    whole = advance(residual, state, lambda i, _: x)
    assert torch.equal(residual.end(whole), residual.end(plain))


def test_what_one_thread_looks_at_another_does_not_see():
    residual, x = begun("attnres-full")
    noted = {}

    def elsewhere():
        noted["held"] = weights_held()
        state = advance(residual, residual.begin(x), lambda i, _: x, stop=1)
        noted["read"], _ = residual.read(state, 1)

    with hold_weights(), record(residual) as trace:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert weights_held()
    assert not weights_held()
    assert noted["held"] is False
    assert noted["read"].requires_grad, "its weights were not held"
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
