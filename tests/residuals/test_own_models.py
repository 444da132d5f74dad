"""Models of other people handle a state: they freeze, cast, select and compile around it."""

import pytest
import torch
from tinymodels import advance, inputs_of
from torch import nn
from torch.testing import assert_close

from headwater.residuals import attention, build, mixing, names, record, with_options
from headwater.residuals.record import replay

TWO_PHASES = ",schedule=two-phase,backend=reference"
IN_TWO_PHASES = [f"attnres-block:block=3{TWO_PHASES}", f"attnres-full:window=none{TWO_PHASES}"]
TOKENS, SEQUENCES = (slice(None), slice(1, 3)), slice(1)
cut_in = pytest.mark.parametrize("cut", [TOKENS, SEQUENCES])


class Network(nn.Module):
    """Linear sublayers with norms around a residual."""

    def __init__(self, spec, count=4, dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(count + 1))
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(count))
        self.residual = build(spec, dim, count)

    def advance(self, state, start=0, stop=None):
        return advance(self.residual, state, self.sublayer, start, stop, self.norms)

    def sublayer(self, i, x):
        return self.layers[i](x)

    def finish(self, state, start=0):
        state = self.advance(state, start)
        return self.residual.end(state, norm=self.norms[-1])

    def forward(self, x):
        return self.finish(self.residual.begin(x))


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("spec", ["attnres-block:block=3", "attnres-full"])
def test_queries_above_frozen_layers_learn_in_two_phases_as_in_one_pass(spec, detach):
    """A query's result over a source is computed when the source is written, where nothing may ask
    for gradients."""
    x, frozen = torch.randn(2, 5, 16), 5
    gradients, outputs = [], []
    for schedule, backend in (("one-pass", "auto"), ("two-phase", "reference")):
        network = Network(with_options(spec, schedule=schedule, backend=backend), 12)
        torch.manual_seed(1)
        for parameter in network.residual.parameters():
            nn.init.normal_(parameter, std=0.3)
        state = network.residual.begin(x)
        with torch.no_grad():
            state = network.advance(state, stop=frozen)
        if detach:
            state = tuple(tensor.detach() for tensor in state)
        y = network.finish(state, frozen)
        (y * torch.linspace(-1, 1, 16)).sum().backward()
        outputs.append(y.detach())
        parameters = network.residual.named_parameters()
        gradients.append({name: parameter.grad for name, parameter in parameters})
    assert_close(*outputs, rtol=1e-4, atol=1e-5)
    one, two = gradients
    learning = set()
    for name, gradient in one.items():
        if gradient is not None and gradient.abs().max() > 1e-6:
            learning.add(int(name.split(".")[1]))
            assert_close(two[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert learning == {*range(frozen, 13)}


def test_a_read_that_is_compiled_by_itself_gives_a_state_that_can_be_written_to():
    residual = build("attnres-block:block=2", 16, 4)
    read = torch.compile(lambda state, i: residual.read(state, i), backend="eager")
    state = residual.begin(torch.randn(2, 3, 16))
    for i in range(4):
        x, state = read(state, i)
        state = residual.write(state, i, x)
    assert residual.end(state).shape == (2, 3, 16)


@pytest.mark.parametrize("spec", names())
def test_a_matrix_read_off_inside_of_a_recording_leaves_it_as_it_was(spec):
    network = Network(spec)
    with torch.inference_mode(), record(network.residual) as trace:
        network(torch.randn(2, 3, 16))
        inside = mixing(network.residual, trace.sources)
    assert len(trace.sources) == 5
    after = mixing(network.residual, trace.sources)
    assert torch.equal(after, inside), "outside of inference mode too"
    assert inside.shape[:2] == (5, 5)


def test_outputs_of_zero_are_known_to_have_no_gradient_where_lengths_are_divided_by():
    for spec, takes_zero in (
        ("elc-bert", True),
        ("elc-bert:variant=normalized", False),
        ("ddl", False),
    ):
        assert build(spec, 16, 4).takes_zero is takes_zero


@cut_in
@pytest.mark.parametrize("spec", [*names(), *IN_TWO_PHASES])
def test_a_state_is_cut_once_it_is_settled(spec, cut, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    network = Network(spec, 6)
    state = network.residual.begin(torch.randn(2, 4, 16))
    expected = network.finish(state)[cut]
    for i in range(6):
        settled = tuple(tensor[cut] for tensor in network.residual.settle(state, i))
        assert_close(network.finish(settled, i), expected)
        state = network.advance(state, i, i + 1)


@cut_in
@pytest.mark.parametrize("spec", [*IN_TWO_PHASES, "hyper-attnres"])
def test_a_state_of_two_phases_that_is_cut_as_it_is_is_refused(spec, cut, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    residual = build(spec, 16, 6)
    state = residual.begin(torch.randn(2, 4, 16))
    state = tuple(tensor[cut] for tensor in state)
    with pytest.raises(ValueError, match=r"takes queries \(7, 16\) in its state, got "):
        residual.read(state, 0)


@pytest.mark.parametrize("spec", names())
def test_gradients_of_each_sample_by_torch_func_are_those_of_its_backward(spec):
    network = Network(spec)
    samples, along = torch.randn(3, 5, 16), torch.linspace(-1, 1, 16)
    parameters = dict(network.named_parameters())

    def loss(values, x):
        return (torch.func.functional_call(network, values, (x,)) * along).sum()

    actual = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, samples)
    for n, sample in enumerate(samples):
        gradients = torch.autograd.grad(loss(parameters, sample), [*parameters.values()])
        expected = dict(zip(parameters, gradients))
        of_sample = {name: gradient[n] for name, gradient in actual.items()}
        assert_close(of_sample, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", names())
def test_what_was_built_on_the_meta_device_needs_no_more_than_its_weights(spec):
    network, x = Network(spec), torch.randn(2, 3, 16)
    with torch.device("meta"):
        empty = Network(spec)
    empty.to_empty(device="cpu")
    empty.load_state_dict(network.state_dict())
    assert_close(empty(x), network(x), rtol=0, atol=0)
    empty.bfloat16()
    tensors = [*empty.parameters(), *empty.buffers()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}

    # A move that changes nothing leaves a module's memory as it is.
    buffers = list(network.buffers())
    network.to("cpu").float()
    assert list(map(id, network.buffers())) == list(map(id, buffers))
    network.share_memory()
    assert all(parameter.is_shared() for parameter in network.parameters())
    assert all(buffer.is_shared() for buffer in network.buffers())


LAST_SOURCES = ["attnres-full:window=2", "delta-attnres:block=3", "deepcrossattention:last=1"]


@pytest.mark.parametrize("spec", [*names(), *LAST_SOURCES, *IN_TWO_PHASES])
def test_outputs_narrower_than_the_stream_are_summed_as_wide_as_it_is(spec):
    """Linear layers under autocast have such outputs."""
    torch.manual_seed(0)
    residual, x = build(spec, 16, 8), torch.randn(2, 3, 16)
    outputs = torch.randn(8, 2, 3, 16).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        narrow = replay(residual, [x, *outputs])
        wide = replay(residual, [x, *outputs.float()])
    for read, exact in zip(narrow, wide, strict=True):
        for one, other in zip(inputs_of(read), inputs_of(exact), strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, other)
