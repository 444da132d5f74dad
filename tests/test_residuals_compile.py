"""Every residual is one graph for torch.compile, with the values and gradients it has without."""

import pytest
import torch

from headwater.residuals import build, names
from headwater.residuals.record import replay

pytestmark = pytest.mark.slow
SPECS = [
    "mhc:iterations=3" if name == "mhc" else name for name in names()
]  # its loop is unrolled: 20 take half a minute
OPTIONS = ["attnres-block:block=2", "ddl:width=2,compress=token", "deepcrossattention:last=1"]


@pytest.mark.parametrize("spec", [*SPECS, *OPTIONS])
def test_one_graph(spec):
    torch.manual_seed(0)
    torch.compiler.reset()
    residual = build(spec, 8, 4)
    for p in residual.parameters():
        torch.nn.init.normal_(p, std=0.3)
    leaves = [torch.randn(2, 3, 8, requires_grad=True) for _ in range(5)]
    inputs = [*leaves, *residual.parameters()]

    def total(*sources):
        reads = replay(residual, sources)
        return sum(x.square().sum() for read in reads for x in (read if isinstance(read, tuple) else (read,)))

    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    expected, value = total(*leaves), compiled(*leaves)
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
    wanted, gradients = (torch.autograd.grad(x, inputs) for x in (expected, value))
    torch.testing.assert_close(gradients, wanted, atol=1e-4, rtol=1e-4)
