"""Every residual's decoder is one graph for torch.compile, with the same logits and gradients.

No code is generated, which would take half a minute a decoder; inductor itself runs for the one
residual with an operator that it cannot look into, and leaves the operators around it to PyTorch.
aot_eager, which also traces the backward pass, is for residuals with operators of headwater's; of
those made of PyTorch's own operators, dynamo's graph runs as it is.
"""

import pytest
import torch
from kernel_cases import INDUCTOR, UNFUSED, with_gradients
from tinymodels import DIM, advance, gradients_of, inputs_of, model_of, tokens_of
from torch import nn
from torch.testing import assert_close

from headwater.residuals import build, names

OPTIONS = [
    "attnres-block:block=3",
    "ddl:width=2,compress=token,expand=token",
    "ddl:width=2,compress=channel",
    "deepcrossattention:last=1",
    "laurel:form=previous,states=2,rank=4",
    "hyper-connections:form=static",
]


OWN_OPERATORS = ("standard", "attnres", "delta-attnres", "hyper-attnres", "mhc")
SOURCES = ("attnres-full", "delta-attnres", "hyper-attnres")


class Stack(nn.Module):
    """Linear sublayers: attention would take inductor longest, and says nothing about a residual."""

    def __init__(self, spec, layers):
        super().__init__()
        self.residual = build(spec, DIM, layers)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))

    def forward(self, x):
        state = self.residual.begin(x)
        state = advance(self.residual, state, lambda i, x: self.layers[i](x))
        return self.residual.end(state)


def layers_of(spec):
    """Layers that show all of a graph.

    Two where the state grows from layer to layer; else the second layer would repeat the first. One
    where the state is a list of sources, of which a layer and the head read one, two and three.
    """
    if spec.startswith(SOURCES):
        return 1
    residual = build(spec, DIM, 4)
    lengths = {len(residual.layout(i)) for i in (0, 2, 4)}
    return 2 if len(lengths) > 1 else 1


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_the_decoder_is_one_graph(spec):
    torch.compiler.reset()
    model, tokens = model_of(spec, scatter=True, layers=layers_of(spec)), tokens_of()
    expected, desired = gradients_of(model, tokens)
    # mhc-lite has no Sinkhorn iteration.
    has_operators = spec.startswith(OWN_OPERATORS) and spec != "mhc-lite"
    backend = "aot_eager" if has_operators else "eager"
    traced = torch.compile(model, backend=backend, fullgraph=True)
    logits, gradients = gradients_of(traced, tokens)
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    desired = {f"_orig_mod.{name}": gradient for name, gradient in desired.items()}
    assert_close(gradients, desired, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_a_layer_compiles_by_itself_whatever_its_number(spec):
    """Engines compile layer by layer; after the second number torch.compile takes it to vary."""
    torch.compiler.reset()
    torch.manual_seed(0)
    residual = build(spec, DIM, 4)

    def layer(i, *state):
        read, state = residual.read(state, i)
        return residual.write(state, i, torch.tanh(sum(inputs_of(read))))

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    expected = actual = tuple(residual.begin(torch.randn(2, 3, DIM)))
    for i in range(4):
        expected = tuple(layer(i, *expected))
        actual = tuple(compiled(i, *actual))
    assert_close(actual, expected)


@pytest.mark.slow
def test_inductor_gives_the_same():
    torch.compiler.reset()
    torch.manual_seed(0)
    stack = Stack("mhc", 1)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, seed = torch.randn(2, 3, 4, DIM)
    compiled = torch.compile(stack, fullgraph=True, options=INDUCTOR | UNFUSED)
    parameters = [*stack.parameters()]
    results = [with_gradients([forward(x)], parameters, [seed]) for forward in (stack, compiled)]
    assert_close(*results, atol=1e-4, rtol=1e-3)


def test_autocast_is_part_of_the_graph():
    torch.compiler.reset()
    model, tokens = model_of("mhc", scatter=True, layers=1), tokens_of()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
    assert_close(actual, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("spec", ["attnres-block:block=2", "mhc"])
def test_torch_export_takes_a_network_with_a_residual_and_what_it_gives_can_be_trained(spec):
    network, x = Stack(spec, 4), torch.randn(2, 5, DIM)
    # Another length than the exported one.
    lengths = ({1: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(network, (x,), dynamic_shapes=lengths).module()
    longer = torch.randn(2, 7, DIM)
    expected, actual = network(longer), exported(longer)
    parameters, seeds = [*network.parameters()], [torch.randn_like(expected)]
    assert_close(*(with_gradients([y], parameters, seeds) for y in (actual, expected)))
