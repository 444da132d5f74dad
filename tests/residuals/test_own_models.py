"""Models of other people handle a state: they freeze, cast, select and compile around it."""

import pytest
import torch
from torch import nn

from headwater.residuals import attention, build, mixing, names, record
from headwater.residuals.base import Placed
from headwater.residuals.record import replay

IN_TWO_PHASES = [
    f"attnres-{how}schedule=two-phase,backend=reference" for how in ("block:block=3,", "full:")
]


def stack(count: int, dim: int = 16) -> tuple[list[nn.Module], list[nn.Module]]:
    torch.manual_seed(0)
    return [nn.RMSNorm(dim) for _ in range(count + 1)], [nn.Linear(dim, dim) for _ in range(count)]


def run(residual, x, norms, layers, *, frozen: int, detach: bool = False):
    state = residual.begin(x)
    for i, layer in enumerate(layers):
        with torch.set_grad_enabled(i >= frozen):
            read, state = residual.read(state, i, norm=norms[i])
            state = residual.write(state, i, layer(read))
        if detach and i + 1 == frozen:
            state = tuple(tensor.detach() for tensor in state)
    return residual.end(state, norm=norms[-1])


@pytest.mark.parametrize("how", ["no_grad", "detach"])
@pytest.mark.parametrize("spec", ["attnres-block:block=3", "attnres-full"])
def test_queries_above_frozen_layers_learn_in_two_phases_as_in_one_pass(spec, how):
    """A query's result over a source is computed when the source is written, where nothing may ask for gradients."""
    norms, layers = stack(12)
    x, gradients, outputs = torch.randn(2, 5, 16), {}, {}
    for schedule in ("one-pass", "two-phase"):
        backend = "reference" if schedule == "two-phase" else "auto"
        residual = build(
            f"{spec}{',' if ':' in spec else ':'}schedule={schedule},backend={backend}", 16, 12
        )
        torch.manual_seed(1)
        for parameter in residual.parameters():
            nn.init.normal_(parameter, std=0.3)
        y = run(residual, x, norms, layers, frozen=5, detach=how == "detach")
        (y * torch.linspace(-1, 1, 16)).sum().backward()
        outputs[schedule] = y.detach()
        gradients[schedule] = {
            name: parameter.grad for name, parameter in residual.named_parameters()
        }
    torch.testing.assert_close(*outputs.values(), rtol=1e-4, atol=1e-5)
    one, two = gradients.values()
    learning = [
        name
        for name, gradient in one.items()
        if gradient is not None and gradient.abs().max() > 1e-6
    ]
    assert {int(name.split(".")[1]) for name in learning} == {*range(5, 13)}
    for name in learning:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("spec", names())
def test_a_state_is_rebuilt_as_a_plain_tuple(spec):
    """Whoever moves or casts what a layer takes makes type(state)(...) of its tensors."""
    residual = build(spec, 16, 4)
    norms, layers = stack(4)
    state = residual.begin(torch.randn(2, 3, 16))
    assert type(state) is Placed
    rebuilt = type(state)(tensor.clone() for tensor in state)
    assert type(rebuilt) is tuple
    whole, cut = (run_from(residual, losses, norms, layers) for losses in (state, rebuilt))
    assert torch.equal(whole, cut)


def run_from(residual, state, norms, layers, first=0):
    for i in range(first, len(layers)):
        read, state = residual.read(state, i, norm=norms[i])
        read = read[0] if isinstance(read, tuple) else read
        state = residual.write(state, i, layers[i](read))
    return residual.end(state, norm=norms[-1])


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
    residual = build(spec, 16, 4)
    norms, layers = stack(4)
    with torch.inference_mode(), record(residual) as trace:
        run_from(residual, residual.begin(torch.randn(2, 3, 16)), norms, layers)
        inside = mixing(residual, trace.sources)
    assert len(trace.sources) == 5
    assert torch.equal(mixing(residual, trace.sources), inside), "outside of inference mode too"
    assert inside.shape[:2] == (5, 5)


def test_outputs_of_zero_are_known_to_have_no_gradient_where_lengths_are_divided_by():
    assert [build(spec, 16, 4).takes_zero for spec in ("elc-bert", "elc-bert:variant=normalized", "ddl")] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [(slice(None), slice(1, 3)), slice(1)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("spec", [*names(), *IN_TWO_PHASES])
def test_a_state_is_cut_once_it_is_settled(spec, cut, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    (norms, layers), x = stack(6), torch.randn(2, 4, 16)
    residual = build(spec, 16, 6)
    state = residual.begin(x)
    expected = run_from(residual, state, norms, layers)[cut]
    for i, layer in enumerate(layers):
        settled = tuple(tensor[cut] for tensor in residual.settle(state, i))
        torch.testing.assert_close(run_from(residual, settled, norms, layers, i), expected)
        read, state = residual.read(state, i, norm=norms[i])
        state = residual.write(state, i, layer(read[0] if isinstance(read, tuple) else read))


@pytest.mark.parametrize("cut", [(slice(None), slice(1, 3)), slice(1)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("spec", [*IN_TWO_PHASES, "hyper-attnres"])
def test_a_state_of_two_phases_that_is_cut_as_it_is_is_refused(spec, cut, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    residual = build(spec, 16, 6)
    state = tuple(tensor[cut] for tensor in residual.begin(torch.randn(2, 4, 16)))
    with pytest.raises(
        ValueError,
        match=r"read 0 of .* takes queries \(7, 16\) in its state, got ",
    ):
        residual.read(state, 0)


class Network(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.residual = residual
        self.norms, self.layers = map(nn.ModuleList, stack(4))

    def forward(self, x):
        return run_from(self.residual, self.residual.begin(x), self.norms, self.layers)


@pytest.mark.parametrize("spec", names())
def test_gradients_of_each_sample_by_torch_func_are_those_of_its_backward(spec):
    network, samples, along = (
        Network(build(spec, 16, 4)),
        torch.randn(3, 5, 16),
        torch.linspace(-1, 1, 16),
    )
    parameters = dict(network.named_parameters())

    def loss(values, x):
        return (torch.func.functional_call(network, values, (x,)) * along).sum()

    actual = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, samples)
    for n, sample in enumerate(samples):
        expected = torch.autograd.grad(loss(parameters, sample), [*parameters.values()])
        for gradient, (name, of_samples) in zip(expected, actual.items(), strict=True):
            torch.testing.assert_close(of_samples[n], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("spec", names())
def test_what_was_built_on_the_meta_device_needs_no_more_than_its_weights(spec):
    network, x = Network(build(spec, 16, 4)), torch.randn(2, 3, 16)
    with torch.device("meta"):
        empty = Network(build(spec, 16, 4))
    empty.to_empty(device="cpu")
    empty.load_state_dict(network.state_dict())
    torch.testing.assert_close(empty(x), network(x), rtol=0, atol=0)
    assert {tensor.dtype for tensor in (*empty.bfloat16().parameters(), *empty.buffers())} == {
        torch.bfloat16
    }
    references = list(network.buffers())
    saved = [
        now is before
        for now, before in zip(network.to("cpu").float().buffers(), references, strict=True)
    ]
    assert all(saved), "a move that changes nothing leaves a module's memory as it is"
    network.share_memory()
    assert all(tensor.is_shared() for tensor in (*network.parameters(), *network.buffers()))


SINGLE_READS = [
    *names(),
    "attnres-full:window=2",
    "delta-attnres:block=3",
    "deepcrossattention:last=1",
]


@pytest.mark.parametrize("spec", SINGLE_READS + IN_TWO_PHASES)
def test_outputs_narrower_than_the_stream_are_summed_as_wide_as_it_is(spec):
    """Linear layers under autocast have such outputs."""
    torch.manual_seed(0)
    residual, x = build(spec, 16, 8), torch.randn(2, 3, 16)
    outputs = torch.randn(8, 2, 3, 16).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        narrow, wide = (
            replay(residual, [x, *arguments]) for arguments in (outputs, outputs.float())
        )
    for values, exact in zip(narrow, wide, strict=True):
        values, exact = (read if isinstance(read, tuple) else (read,) for read in (values, exact))
        assert [read.dtype for read in values] == [torch.float32] * len(values)
        assert all(map(torch.equal, values, exact))
