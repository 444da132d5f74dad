"""Every residual's decoder is one graph for torch.compile, with the logits and gradients it has without.

aot_eager traces forward and backward and generates no code, which would take half a minute a decoder; inductor itself
runs for the one with an operator that it cannot look into.
"""

import pytest
import torch
from tinymodels import gradients_of, model_of, tokens_of

from headwater.residuals import names

OPTIONS = [
    "attnres-block:block=3",
    "ddl:width=2,compress=token,expand=token",
    "ddl:width=2,compress=channel",
    "deepcrossattention:last=1",
    "laurel:form=previous,states=2,rank=4",
    "hyper-connections:form=static",
]


def check(spec, backend, layers=2):
    torch.compiler.reset()
    model, tokens = model_of(spec, scatter=True, layers=layers), tokens_of()
    expected, wanted = gradients_of(model, tokens)
    traced = torch.compile(model, backend=backend, fullgraph=True)
    logits, gradients = gradients_of(traced, tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[f"_orig_mod.{name}"], gradient, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_the_decoder_is_one_graph(spec):
    check(spec, "aot_eager")


@pytest.mark.slow
def test_inductor_gives_the_same():
    check("mhc", "inductor", layers=1)


def test_autocast_is_part_of_the_graph():
    torch.compiler.reset()
    model, tokens = model_of("mhc", scatter=True, layers=2), tokens_of()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)
        torch.testing.assert_close(
            torch.compile(model, backend="aot_eager", fullgraph=True)(tokens), expected, atol=0.02, rtol=0.02
        )
