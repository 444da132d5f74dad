"""A converted Llama on a GPU, where the kernels are the default. Skipped without CUDA.

pytest tests/hf/test_hf_gpu.py      # with test_hf_devices.py and test_hf_fla.py
"""

from functools import partial

import pytest
import torch
from tinyhf import greedy, logits, stir
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.hf import convert, verify

if torch.cuda.is_available():  # else the interpreter's variable may come after triton
    from headwater.ops.triton.launch import launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
RESIDUALS = ["attnres-block:block=3", "attnres-full"]
residuals = pytest.mark.parametrize("residual", RESIDUALS)


def llama(dtype=torch.float32, residual=None, amount=0.0, shape=None, **options):
    """A random model, converted to a residual that is moved off its start."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **(shape or {})})).eval().to("cuda", dtype)
    if residual is not None:
        convert(model, residual, **options)
        stir(model, amount)
    launches.clear()
    return model


def rows(batch=4, length=64, words=512):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, words, (batch, length), generator=generator).cuda()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def count_calls(norms):
    """A list that grows with each call of one of the norms. By their own forward: one with hooks is always called."""
    calls = []

    def counting(forward, x):
        calls.append(x.shape)
        return forward(x)

    for norm in norms:
        norm.forward = partial(counting, norm.forward)
    return calls


def norms_of(model):
    """The norms of all layers but the first, which reads the embedding as it is."""
    return [layer.input_layernorm for layer in model.model.layers[1:]]


def ran(*kernels):
    assert all(launches[name] > 0 for name in kernels), dict(launches)
    launches.clear()


@residuals
def test_converted_in_bf16_it_is_as_near_to_fp32_as_the_plain_model(residual):
    truth, plain, model = llama(), llama(torch.bfloat16), llama(torch.bfloat16)
    report = convert(model, residual)
    called, called_in_plain = count_calls(norms_of(model)), count_calls(norms_of(plain))
    launches.clear()
    converted, baseline = verify(model, truth, rows()), verify(plain, truth, rows())
    ran("score", "mix")
    assert report.equal_at_start
    assert converted.kl <= 2 * baseline.kl, f"{converted}\n{baseline}"
    assert called_in_plain
    assert not called  # the norms ran inside the kernels


@residuals
def test_trained_it_follows_the_reference(residual):
    """The losses of the kernels and of plain PyTorch agree over a few steps in fp32. With momentum: Adam
    divides small gradients by themselves, and plain PyTorch itself ends 2e-3 from fp64; so it is 2e-4."""

    def train(**options):
        model = llama(residual=residual, amount=0.1, **options).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(8):
            loss = model(rows(), labels=rows()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return torch.tensor(losses)

    reference, converted = train(backend="reference"), train()
    ran("score_backward", "mix_backward")
    assert converted[-1] < converted[0] - 0.5
    torch.testing.assert_close(converted, reference, rtol=2e-3, atol=0.0)


@residuals
def test_gradients_under_both_kinds_of_checkpointing(residual):
    model = llama(residual=residual, amount=0.1).train()
    plain = gradients(model, model(rows(), labels=rows()).loss)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = gradients(model, model(rows(), labels=rows()).loss)
        assert torch.cosine_similarity(plain, again, dim=0) > 0.999999
        model.gradient_checkpointing_disable()


@residuals
def test_generates_the_same_with_and_without_a_cache(residual):
    model = llama(residual=residual, amount=0.5)
    prompt = rows(2, 16)
    texts = [greedy(model, prompt, 64, pad_token_id=0, use_cache=use) for use in (True, False)]
    ran("score", "mix")
    assert torch.equal(*texts)


@residuals
def test_depth_weights_beside_the_kernels(residual):
    model = llama(torch.bfloat16, residual, 0.5)
    plain = logits(model, rows())
    launches.clear()
    with torch.no_grad():
        out = model(rows(), output_depth_weights=True)
    ran("score", "mix")
    assert torch.equal(out.logits, plain)
    for weights in out.depth_weights:
        torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    assert max(float(weights.std()) for weights in out.depth_weights) > 0.01


@residuals
def test_gradients_of_a_watched_model_add_up(residual):
    """A layer that is watched reads twice from one state."""
    results = []
    for options in ({"backend": "reference"}, {}):
        model = llama(residual=residual, amount=0.1, **options)
        out = model(rows(), labels=rows(), output_depth_weights=True, output_hidden_states=True)
        loss = out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)
        results.append(gradients(model, loss))
    ran("score_backward", "mix_backward")
    assert torch.cosine_similarity(*results, dim=0) > 0.9999


@residuals
def test_compiles_to_one_graph(residual):
    shape = {"num_hidden_layers": 2}
    model = llama(residual=residual.replace("block=3", "block=2"), amount=0.5, shape=shape)
    compiled = torch.compile(model, fullgraph=True)
    near = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(logits(compiled, rows()), logits(model, rows()), **near)
    converted, eager = (
        gradients(model, run(rows(), labels=rows()).loss) for run in (compiled, model)
    )
    assert torch.cosine_similarity(converted, eager, dim=0) > 0.9999
    torch.testing.assert_close(converted.norm(), eager.norm(), rtol=1e-3, atol=0.0)
    torch._dynamo.reset()


BILLION = {  # the shape of Llama 3.2 1B
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip


def billion(dtype):
    """Made on the GPU: drawn on the host it would take longer than the rest of the test."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**BILLION), dtype=torch.bfloat16)
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in fp32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def gradients_by_name(model, batch):
    """Gradients in fp32; the model keeps none."""
    model(batch, labels=batch).loss.backward()
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def worst(converted, truth):
    """The relative distance from the truth of the tensor that is farthest."""
    return max(
        float((converted[name] - expected).norm() / expected.norm())
        for name, expected in truth.items()
    )


def test_a_model_of_a_billion_parameters_in_bf16():
    """Forward and cached decoding, every gradient, and generation, each against the plain model in fp32: the converted
    model in bf16 is at most twice as far from it as the plain one in bf16."""
    truth, plain, model = billion(torch.float32), billion(torch.bfloat16), billion(torch.bfloat16)
    assert sum(parameter.numel() for parameter in plain.parameters()) > 1e9
    report = convert(model, "attnres-block:block=8")
    assert report.equal_at_start
    batch = rows(2, 128, BILLION["vocab_size"])
    launches.clear()
    result = verify(model, plain, batch)
    assert result.equal, str(result)
    assert result.decoding, "no token was decoded from a cache"
    ran("score", "mix")

    expected, baseline, converted = (
        gradients_by_name(network, batch) for network in (truth, plain, model)
    )
    ran("score_backward", "mix_backward")
    assert worst(converted, expected) <= 2 * worst(baseline, expected)
    queries = [gradient for name, gradient in converted.items() if name.endswith(".query")]
    # Every read but the first, which has one source
    assert len(queries) == 2 * BILLION["num_hidden_layers"]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in queries)

    prompt = 16
    text = greedy(model, batch[:, :prompt], 32)
    assert text.shape == (2, prompt + 32)
    scores, half = (logits(network, text).float()[:, prompt - 1 : -1] for network in (truth, plain))
    chosen = scores.gather(-1, text[:, prompt:, None]).squeeze(-1)
    # An argmax of logits that are e off loses at most 2 e; and e may be twice the plain model's.
    assert float((scores.amax(-1) - chosen).max()) <= 2 * 2 * float((half - scores).abs().max())
