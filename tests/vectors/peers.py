"""Makes the vectors of peers/: the same inputs through implementations that others wrote. Run once, not in the tests:

    pip install hyper-connections==0.4.11 transformers==5.22.2 x-transformers==2.31.10
    python tests/vectors/peers.py [names]

Files have the format of their parent folder, parameters under our names. Their outputs are theirs, in fp64. Where our
formula is a special case of a peer's, or the reverse, `change` sets the parameters to what both have.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace

import torch
from make import DIM, FOLDER, SUBLAYERS, evaluate, make
from safetensors.torch import save_file

STREAMS = 3


def theirs_hyper_connections(given, sources):
    """hyper-connections by lucidrains: streams folded into the batch."""
    from hyper_connections import HyperConnections

    streams, reads = sources[0].repeat_interleave(STREAMS, dim=0), []
    for i in range(SUBLAYERS):
        ours = {name: given[f"parameter.connections.{i}.{name}"].double() for name in NAMES}
        module = HyperConnections(STREAMS, dim=DIM, layer_index=i).double()
        with torch.no_grad():
            module.static_beta.copy_(ours["post"])
            module.static_alpha.copy_(torch.cat((ours["pre"].unsqueeze(1), ours["res"]), dim=1))
            module.dynamic_beta_fn.copy_(ours["dynamic"][0])
            module.dynamic_alpha_fn.copy_(ours["dynamic"][1:].T)
            module.dynamic_beta_scale.copy_(ours["post_scale"][0])
            module.dynamic_alpha_scale.copy_(ours["mix_scale"][0])
        read, add = module(streams)
        reads.append(read)
        streams = add(sources[i + 1])
    return [*reads, streams.unflatten(0, (-1, STREAMS)).sum(1)]


NAMES = ("post", "pre", "res", "dynamic", "post_scale", "mix_scale")


def theirs_mhc(given, sources):
    """transformers' DeepSeek-V4: comb is the transpose of the paper's mixing matrix, so our logits are transposed."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    config = SimpleNamespace(
        hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-20, hidden_size=DIM
    )
    transposed = torch.arange(STREAMS**2).view(STREAMS, STREAMS).T.flatten()
    order = torch.cat((torch.arange(2 * STREAMS), 2 * STREAMS + transposed))
    streams, reads = sources[0].unsqueeze(2).repeat(1, 1, STREAMS, 1), []
    for i in range(SUBLAYERS):
        module = DeepseekV4HyperConnection(config)
        with torch.no_grad():
            module.fn.copy_(given[f"parameter.mappings.{i}.weight"][order])
            module.base.copy_(given[f"parameter.mappings.{i}.bias"][order])
            module.scale.copy_(given[f"parameter.mappings.{i}.scale"])
        post, comb, read = module.double()(streams)
        reads.append(read)
        mixed = torch.matmul(comb.mT.to(streams), streams)  # as its decoder layer applies it
        streams = post.to(streams).unsqueeze(-1) * sources[i + 1].unsqueeze(-2) + mixed
    return [*reads, streams.sum(2)]


def theirs_x_attention(given, sources):
    """x-transformers' AttentionResidual: the query is the normed newest source plus a low-rank map of it, here zero."""
    from x_transformers.x_transformers import AttentionResidual

    reads = [sources[0]]
    for i in range(1, SUBLAYERS + 1):
        module = AttentionResidual(DIM, lora_rank=2).double()
        with torch.no_grad():
            for parameter in module.to_query[1].parameters():
                parameter.zero_()
            module.to_keys.weight.copy_(given[f"parameter.reads.{i}.key_weight"])
            # Its logits are scaled
            module.norm.weight.copy_(given[f"parameter.reads.{i}.query"].diagonal() * DIM**0.5)
        reads.append(module(sources[: i + 1]))
    return reads


def diagonal_queries(given):
    return {
        k: torch.diag(v.diagonal()) if ".reads." in k and k.endswith("query") else v
        for k, v in given.items()
    }


def theirs_x_layerscale(given, sources):
    from x_transformers.x_transformers import LayerScale, Residual

    stream, reads = sources[0], [sources[0]]
    for i in range(SUBLAYERS):
        module = LayerScale(lambda _, i=i: sources[i + 1], DIM).double()
        with torch.no_grad():
            module.gamma.copy_(given[f"parameter.gains.{i}"])
        skip = Residual(DIM)
        _, inner, rest = skip.prepare(stream)
        stream = skip(module(stream), inner, **rest)
        reads.append(stream)
    return reads


def theirs_x_deepnorm(given, sources):
    """What x-transformers does without pre-norm, with a constant on the skip and RMSNorm."""
    from x_transformers.x_transformers import Residual, RMSNorm

    stream, reads = sources[0], [sources[0]]
    for i in range(SUBLAYERS):
        skip, norm = Residual(DIM, scale_residual_constant=SUBLAYERS**0.25), RMSNorm(DIM).double()
        with torch.no_grad():
            norm.g.copy_(given[f"parameter.norms.{i}"])
        stream = norm(skip(sources[i + 1], stream))
        reads.append(stream)
    return reads


@dataclass(frozen=True)
class Peer:
    spec: str
    theirs: Callable
    package: str
    change: Callable = dict


PEERS = {
    "hyper-connections": Peer(
        f"hyper-connections:streams={STREAMS}", theirs_hyper_connections, "hyper-connections"
    ),
    "mhc": Peer(f"mhc:streams={STREAMS}", theirs_mhc, "transformers"),
    "x-transformers-attnres": Peer(
        "attnres-full:query=projected", theirs_x_attention, "x-transformers", diagonal_queries
    ),
    "x-transformers-deepnorm": Peer("deepnorm", theirs_x_deepnorm, "x-transformers"),
    "x-transformers-layerscale": Peer("layerscale", theirs_x_layerscale, "x-transformers"),
}


def record(name: str, peer: Peer) -> None:
    source = f"{peer.package} {version(peer.package)}"
    given = make(peer.spec)
    inputs = {
        k: v.detach()
        for k, v in given.items()
        if k.split(".")[0] in ("source", "parameter", "cotangent")
    }
    inputs = peer.change(inputs)
    sources = [inputs[f"source.{i}"].double().requires_grad_() for i in range(SUBLAYERS + 1)]
    reads = {f"read.{i}": read for i, read in enumerate(peer.theirs(inputs, sources))}
    total = sum((read * inputs[f"cotangent.{k}"].double()).sum() for k, read in reads.items())
    gradients = {
        f"gradient.source.{i}": g for i, g in enumerate(torch.autograd.grad(total, sources))
    }
    outputs = {k: v.detach() for k, v in (reads | gradients).items()}
    ours = evaluate(peer.spec, inputs)
    worst = max((outputs[k] - ours[k].detach()).abs().max().item() for k in outputs)
    print(f"{peer.spec}: largest difference to {source}: {worst:.2e}")
    tensors = {k: v.float().contiguous() for k, v in (inputs | outputs).items()}
    save_file(
        tensors,
        FOLDER / "peers" / f"{name}.safetensors",
        {"residual": peer.spec, "made_by": source},
    )


def main() -> None:
    (FOLDER / "peers").mkdir(exist_ok=True)
    for name in sys.argv[1:] or PEERS:
        record(name, PEERS[name])


if __name__ == "__main__":
    main()
