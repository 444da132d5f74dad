"""Residuals of released models against transformers' own models, whose attentions, MLPs and norms are exchanged for
fixed outputs: every read, and the gradients of all sources and parameters, in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from headwater.residuals import Residual, build
from headwater.residuals.record import replay

LAYERS = 5


@dataclass(frozen=True)
class Release:
    spec: str
    module: str  # in transformers.models
    model: str
    config: str
    settings: dict
    returns: (
        int  # outputs of an attention, of which all but the first are None; 0: a tensor by itself
    )
    rename: Callable[[nn.Module], dict[str, Tensor]]  # ours by name, of the model's parameters


def inkling(model: nn.Module) -> dict[str, Tensor]:
    parameters = {f"reads.{2 * LAYERS}.query": model.final_input.query}
    for i, layer in enumerate(model.layers):
        parameters[f"reads.{2 * i + 1}.query"] = layer.mlp_input.query
        if layer.attention_input is not None:
            parameters[f"reads.{2 * i}.query"] = layer.attention_input.query
    return parameters


def constrained(model: nn.Module) -> dict[str, Tensor]:
    """DeepSeek-V4, GLM-5.3 and Hy-V4; their mixing matrix is the transpose of ours."""
    parameters = {}
    for i, layer in enumerate(model.layers):
        for k, connection in enumerate((layer.attn_hc, layer.ffn_hc)):
            n, key = connection.hc_mult, f"mappings.{2 * i + k}"
            for part, tensor in (("weight", connection.fn), ("bias", connection.base)):
                pre_post, matrices = tensor[: 2 * n], tensor[2 * n :]
                if len(matrices):
                    matrices = matrices.unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
                parameters[f"{key}.{part}"] = torch.cat((pre_post, matrices))
            parameters[f"{key}.scale"] = connection.scale
    head, key = model.hc_head, f"mappings.{2 * LAYERS}"
    if [*head.parameters()]:
        parameters |= {f"{key}.weight": head.hc_fn, f"{key}.bias": head.hc_base}
        parameters[f"{key}.scale"] = head.hc_scale
    return parameters


def gated(model: nn.Module) -> dict[str, Tensor]:
    parts = [model.hyper_connection_mixer]
    for layer in reversed(model.layers):
        parts = [layer.attn_hyper_connection, layer.mlp_hyper_connection, *parts]
    parameters = {}
    for i, part in enumerate(parts):
        norm = part.hc_norm.weight.unflatten(0, (part.hc_count, -1))
        parameters |= {f"gates.{i}.norm": norm}
        parameters |= {f"gates.{i}.down": part.input_mix_weight_down.weight}
        parameters |= {f"gates.{i}.up": part.input_mix_weight_up.weight}
        if part.block_inject_weight is not None:
            parameters |= {f"gates.{i}.inject": part.block_inject_weight.weight}
    return parameters


INDEXED = {"layer_types": ["indexed_attention"] * LAYERS}
# Two of the largest eps that a difference of place would show.
EPS = {"hc_eps": 0.03, "rms_norm_eps": 0.1}
RELEASES = {
    "inkling2": Release(
        "attnres-routed:block=4",
        "inkling2.modeling_inkling2",
        "Inkling2TextModel",
        "Inkling2TextConfig",
        {
            "n_layers_per_attn_res_block": 2,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        },
        2,
        inkling,
    ),
    "deepseek_v4": Release(
        "mhc:streams=3,iterations=4,eps=0.03,norm_eps=0.1,final=learned",
        "deepseek_v4.modeling_deepseek_v4",
        "DeepseekV4Model",
        "DeepseekV4Config",
        {"hc_mult": 3, "hc_sinkhorn_iters": 4, **EPS},
        2,
        constrained,
    ),
    "glm5_next": Release(
        "mhc:streams=3,iterations=4,eps=0.03,norm_eps=0.1,final=mean",
        "glm5_next.modeling_glm5_next",
        "Glm5NextTextModel",
        "Glm5NextTextConfig",
        {"hc_mult": 3, "hc_sinkhorn_iters": 4, **EPS, **INDEXED},
        3,
        constrained,
    ),
    "hy_v4": Release(
        "identity-hc:streams=3,magnitude=1.5,eps=0.03,norm_eps=0.1",
        "hy_v4.modeling_hy_v4",
        "HYV4Model",
        "HYV4Config",
        {"hc_mult": 3, "hc_magnitude": 1.5, **EPS},
        3,
        constrained,
    ),
    "qwen4_exp": Release(
        "gated-hc:streams=3,rank=5,eps=0.1",
        "qwen4_exp.modeling_qwen4_exp",
        "Qwen4ExpTextModel",
        "Qwen4ExpTextConfig",
        {
            "hc_count": 3,
            "hc_lowrank": 5,
            "rms_norm_eps": 0.1,
            "layer_types": ["linear_attention"] * LAYERS,
        },
        0,
        gated,
    ),
}


class Sublayer(nn.Module):
    """Notes what it reads, and returns a fixed output."""

    def __init__(self, reads: list[Tensor], output: Tensor, returns: int) -> None:
        super().__init__()
        self.reads, self.output, self.returns = reads, [output], returns

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        inputs += tuple(x for name, x in named.items() if name.endswith("hidden_states"))
        self.reads.append(torch.stack(inputs) if len(inputs) > 1 else inputs[0])
        (output,) = self.output
        return (output, None, None)[: self.returns] if self.returns else output


class Pass(nn.Module):
    def forward(self, x: Tensor, **_: object) -> Tensor:
        return x


def model_of(release: Release, dim: int, reads: list[Tensor], sources: list[Tensor]) -> nn.Module:
    """The released model with random residual parameters, in fp64, and nothing else of its own."""
    module = import_module(f"transformers.models.{release.module}")
    settings = {"hidden_size": dim, "num_hidden_layers": LAYERS, "vocab_size": 8}
    settings |= {"pad_token_id": None, **release.settings}
    with torch.device("meta"):
        model = getattr(module, release.model)(getattr(module, release.config)(**settings))
    model.norm = model.embed_tokens = Pass()
    for i, layer in enumerate(model.layers):
        for name, _ in list(layer.named_children()):
            if "norm" in name or "convolution" in name:
                setattr(layer, name, Pass())
            elif name.endswith("attn"):
                setattr(layer, name, Sublayer(reads, sources[2 * i + 1], release.returns))
            elif name == "mlp":
                layer.mlp = Sublayer(reads, sources[2 * i + 2], 0)
    model.to_empty(device="cpu").double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("dim", "shape"), [(6, (2, 3)), (16, (1, 5))])
@pytest.mark.parametrize("name", RELEASES)
def test_reads_and_gradients_are_those_of_the_released_model(name, dim, shape, monkeypatch):
    # Their fp32 would be the larger part of the difference.
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.manual_seed(dim)
    release = RELEASES[name]
    sources = [torch.randn(*shape, dim).double().requires_grad_() for _ in range(2 * LAYERS + 1)]
    expected: list[Tensor] = []
    model = model_of(release, dim, expected, sources)
    expected.append(model(inputs_embeds=sources[0], use_cache=False).last_hidden_state)

    residual = residual_of(release, model, dim)
    reads = stacked(residual, sources)
    for read, desired in zip(reads, expected, strict=True):
        torch.testing.assert_close(read.expand_as(desired), desired, rtol=1e-11, atol=1e-12)

    # The same scalar of both, so that every read has a gradient to pass on.
    cotangents = [torch.randn(x.shape).double() for x in expected]
    sum_of(reads, cotangents).backward()
    of_sources = [source.grad for source in sources]
    for source in sources:
        source.grad = None
    sum_of(expected, cotangents).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    desired = release.rename(model)
    gradients = {name: parameter.grad for name, parameter in residual.named_parameters()}
    gradients |= {f"source {i}": gradient for i, gradient in enumerate(of_sources)}
    desired |= {f"source {i}": source.grad for i, source in enumerate(sources)}
    assert all(gradient.any() for gradient in desired.values())
    torch.testing.assert_close(gradients, desired, rtol=1e-9, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("name", RELEASES)
def test_bf16_reads_are_no_further_from_the_truth_than_twice_theirs(name):
    torch.manual_seed(0)
    release, dim = RELEASES[name], 64
    sources = [torch.randn(2, 16, dim).bfloat16() for _ in range(2 * LAYERS + 1)]
    theirs: list[Tensor] = []
    model = model_of(release, dim, theirs, sources)
    for parameter in model.parameters():
        parameter.mul_(parameter.shape[-1] ** -0.5).copy_(parameter.bfloat16())
    residual = residual_of(release, model, dim)
    truth = stacked(residual, [source.double() for source in sources])
    ours = stacked(residual.bfloat16(), sources)
    theirs.append(model.bfloat16()(inputs_embeds=sources[0], use_cache=False).last_hidden_state)
    for read, other, exact in zip(ours, theirs, truth, strict=True):
        assert (read - exact).norm() <= 2 * (other - exact).norm()


def residual_of(release: Release, model: nn.Module, dim: int) -> Residual:
    """Ours in fp64, with the parameters of theirs."""
    kinds = []
    for kind in release.settings.get("layer_types", ["hybrid"] * LAYERS):
        kinds += ["mixer" if "sliding" in kind else "attention", "mlp"]
    residual = build(release.spec, dim, 2 * LAYERS, kinds).double()
    residual.load_state_dict(release.rename(model))
    return residual


def stacked(residual: Residual, sources: list[Tensor]) -> list[Tensor]:
    reads = replay(residual, sources)
    return [torch.stack(read) if isinstance(read, tuple) else read for read in reads]


def sum_of(reads: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    return sum((read * cotangent).sum() for read, cotangent in zip(reads, cotangents, strict=True))
