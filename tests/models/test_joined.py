"""The decoder with the operators of joined projections, and without: one model.

Here parts are joined as only a GPU does by itself, and the interpreter runs the kernels.
"""

import functools

import pytest
import torch
from tinymodels import gradients_of, in_pieces, model_of, tokens_of
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwater.models import Decoder, ModelConfig, projection
from headwater.models.attention import Attention
from headwater.models.mlp import SwiGLU

pytest.importorskip("triton", reason="the kernels need triton")
GPU = torch.cuda.is_available()
NAMES = ("swiglu", "swiglu_backward", "rotary", "rotary_backward")


def ran(before=(0, 0, 0, 0)):
    """How often each kernel has run since."""
    from headwater.ops.triton.launch import launches

    return tuple(launches[name] - count for name, count in zip(NAMES, before))


@pytest.fixture
def joined(monkeypatch):
    monkeypatch.setattr(projection, "can_join", lambda x, layers: True)

    def choose(backend):
        for body in (Attention, SwiGLU):
            monkeypatch.setattr(body, "backend", backend)

    return choose


SETTINGS = [
    ({"spec": "standard"}, 2),
    ({"spec": "attnres-block:block=4", "kv_heads": 4}, 2),
    ({"spec": "standard", "value_residual": True}, 2),  # whose values have a second reader
    ({"spec": "standard", "shortswa": 3}, 4),
    ({"spec": "standard", "qk_norm": True}, 0),  # a norm is between
    ({"spec": "deepcrossattention"}, 1),  # only the first has a product for all three inputs
]


@pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize(("settings", "turns"), SETTINGS, ids=str)
def test_a_decoder_is_the_same_with_the_kernels_and_without(joined, settings, turns):
    """Their launches are those of two layers."""
    model, tokens = model_of(**settings, layers=2, scatter=True), tokens_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "can_join", lambda x, layers: False)
        logits, gradients = gradients_of(model, tokens)
    expected = {"reference": (0, 0, 0, 0), "triton": (2, 2, turns, turns)}
    for backend, launched in expected.items():
        joined(backend)
        before = ran()
        again, gradients_again = gradients_of(model, tokens)
        assert ran(before) == launched
        assert_close(again, logits, atol=2e-5, rtol=1e-4)
        assert_close(gradients_again, gradients, atol=2e-5, rtol=1e-3)


@pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
def test_recomputed_activations_give_the_same_gradients(joined):
    joined("triton")
    model, tokens = model_of("standard", layers=2), tokens_of()
    _, gradients = gradients_of(model, tokens)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    model.around = functools.partial(checkpoint, use_reentrant=False)
    assert_close(gradients_of(model, tokens)[1], gradients, atol=0, rtol=0)


@pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
def test_with_a_cache_nothing_is_turned_by_the_kernel(joined):
    joined("triton")
    model, tokens = model_of("standard", layers=2).eval(), tokens_of()
    with torch.no_grad():
        whole, before = model(tokens), ran()
        pieces = in_pieces(model, tokens, 7, 5)
    assert ran(before) == (4, 0, 0, 0)
    assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_on_a_cpu_and_in_fp64_the_reference_runs():
    before = ran()
    gradients_of(model_of("standard", layers=1), tokens_of())
    model = model_of("standard", layers=1).to("cuda" if GPU else "cpu", torch.float64)
    gradients_of(model, tokens_of().to(model.embedding.weight.device))
    assert ran(before) == (0, 0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "shape", [{"heads": 2, "kv_heads": 1, "mlp_dim": 344}, {"heads": 4, "kv_heads": 4, "dim": 384}]
)
def test_a_compiled_step_takes_the_kernels_and_errs_no_more(monkeypatch, shape):
    """In bf16 under autocast: every gradient is at most twice as far from fp32's as without them."""
    settings = {"vocab_size": 64, "dim": 128, "layers": 2, "mlp_dim": 512, "context": 64, **shape}
    tokens = torch.randint(
        0, 64, (4, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )

    def step(backend, half):
        for body in (Attention, SwiGLU):
            monkeypatch.setattr(body, "backend", backend)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, before = Decoder(ModelConfig(**settings)).cuda(), ran()
        model.compile_layers(fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(tokens).float().square().mean()
        loss.backward()
        assert ran(before) == ((2, 2, 2, 2) if backend == "auto" else (0, 0, 0, 0))
        return [loss.detach(), *(p.grad for p in model.parameters())]

    truth = step("reference", half=False)
    kernels, reference = step("auto", half=True), step("reference", half=True)
    for result, plain, exact in zip(kernels, reference, truth, strict=True):
        limit = 2 * (plain - exact).norm() + 1e-3 * exact.norm()
        assert (result - exact).norm() <= limit


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_step_can_be_captured_and_repeats_bit_by_bit():
    torch.manual_seed(0)
    model = Decoder(
        ModelConfig(vocab_size=64, dim=128, layers=2, heads=2, kv_heads=2, mlp_dim=344, context=64)
    )
    model = model.to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 64, (4, 64), device="cuda")

    def run():
        model.zero_grad(set_to_none=True)
        model(tokens).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [gradient.clone() for gradient in run()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(3):
        graph.replay()
        assert_close(results, expected, rtol=0, atol=0)
