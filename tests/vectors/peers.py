"""Makes the vectors of peers/: the same inputs through implementations that others wrote. Run once, not in the tests:

    pip install hyper-connections==0.4.11 transformers==5.22.2
    python tests/vectors/peers.py

Files have the format of their parent folder, parameters under our names. Their outputs are theirs, in fp64.
"""

from types import SimpleNamespace

import torch
from hyper_connections import HyperConnections
from make import DIM, FOLDER, SUBLAYERS, evaluate, make
from safetensors.torch import save_file
from transformers import __version__ as transformers_version
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

STREAMS = 3


def theirs_hyper_connections(given, sources):
    """hyper-connections by lucidrains: streams folded into the batch."""
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
    config = SimpleNamespace(hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-20, hidden_size=DIM)
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


def main() -> None:
    folder = FOLDER / "peers"
    folder.mkdir(exist_ok=True)
    made_by = {
        "hyper-connections": (theirs_hyper_connections, f"hyper-connections {_version()}"),
        "mhc": (theirs_mhc, f"transformers {transformers_version}, DeepseekV4HyperConnection"),
    }
    for name, (theirs, source) in made_by.items():
        spec = f"{name}:streams={STREAMS}"
        given = make(spec)
        inputs = {k: v.detach() for k, v in given.items() if k.split(".")[0] in ("source", "parameter", "cotangent")}
        sources = [inputs[f"source.{i}"].double().requires_grad_() for i in range(SUBLAYERS + 1)]
        reads = {f"read.{i}": read for i, read in enumerate(theirs(inputs, sources))}
        total = sum((read * inputs[f"cotangent.{k}"].double()).sum() for k, read in reads.items())
        gradients = {f"gradient.source.{i}": g for i, g in enumerate(torch.autograd.grad(total, sources))}
        outputs = {k: v.detach() for k, v in (reads | gradients).items()}
        ours = evaluate(spec, inputs)
        worst = max((outputs[k] - ours[k].detach()).abs().max().item() for k in outputs)
        print(f"{spec}: largest difference to {source}: {worst:.2e}")
        tensors = {k: v.float().contiguous() for k, v in (inputs | outputs).items()}
        save_file(tensors, folder / f"{name}.safetensors", {"residual": spec, "made_by": source})


def _version() -> str:
    from importlib.metadata import version

    return version("hyper-connections")


if __name__ == "__main__":
    main()
