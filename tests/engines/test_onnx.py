"""A network with a residual as an ONNX graph computes the same in onnxruntime. `make test-engines`."""

import importlib.util

import pytest
import torch
from torch import nn

from headwater.residuals import build

if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("onnxruntime is not installed here: make test-engines", allow_module_level=True)

DIM, SUBLAYERS = 16, 2


class Network(nn.Module):
    def __init__(self, spec: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(SUBLAYERS))
        self.residual = build(spec, DIM, SUBLAYERS)

    def forward(self, x):
        state = self.residual.begin(x)
        for i, layer in enumerate(self.layers):
            read, state = self.residual.read(state, i)
            state = self.residual.write(state, i, layer(read))
        return self.residual.end(state)


@pytest.mark.parametrize("spec", ["attnres-block:block=1", "mhc"])
def test_the_graph_computes_the_same_for_another_length(spec, tmp_path):
    import onnxruntime

    torch.manual_seed(0)
    network = Network(spec).eval()
    with torch.no_grad():
        for parameter in network.residual.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    lengths = ({1: torch.export.Dim.DYNAMIC},)
    x = torch.randn(2, 5, DIM)
    program = torch.onnx.export(network, (x,), dynamo=True, dynamic_shapes=lengths, verbose=False)
    program.save(tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "network.onnx", providers=["CPUExecutionProvider"]
    )

    longer = torch.randn(2, 7, DIM)
    [actual] = session.run(None, {session.get_inputs()[0].name: longer.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), network(longer).detach())
