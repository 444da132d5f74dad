"""Short runs of a GPTModel of Megatron-Core with its own schedules, one after another in the same processes.

    python megatron_runs.py '[{"residual": "mhc", "pipeline": true}, ...]'

RANK and WORLD_SIZE are set by the caller. Each rank prints a line of JSON for each run; the last stage knows losses.
"""

import contextlib
import json
import sys
import zlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from headwater.integrations.megatron import tensor_shapes, with_residual

LAYERS, VOCABULARY, BATCH, TOKENS, MICRO_BATCHES = 4, 256, 2, 32, 4


def use_cpu() -> None:
    """Megatron-Core asks CUDA for a device and for the state of its random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    zeros = torch.zeros
    torch.zeros = lambda *shape, device=None, **options: zeros(*shape, **options)


def build_model(run: dict) -> GPTModel:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        recompute_granularity="full" if run.get("recompute") else None,
        recompute_method="uniform" if run.get("recompute") else None,
        recompute_num_layers=1 if run.get("recompute") else None,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    if run.get("residual") is not None:
        with_residual(model, run["residual"])
    refill(model)
    return model


def refill(model: GPTModel) -> None:
    """Give each parameter values that depend on its name in the whole model alone."""
    first = model.decoder.layers[0].layer_number - 1
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(int(words[2]) + first)
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(words).encode()))
        shape = list(parameter.shape)
        divided = getattr(parameter, "tensor_model_parallel", False)
        if divided:
            shape[parameter.partition_dim] *= size
        noise = torch.randn(shape, generator=generator)
        if divided:
            noise = noise.chunk(size, parameter.partition_dim)[rank]
        with torch.no_grad():
            if ".residual." in name or parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.05 * noise)


def step(batches, model):
    tokens = next(batches)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    hidden = torch.ones(1, 1, TOKENS, TOKENS).triu(1) > 0  # later tokens
    output = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])

    def mean(losses):
        loss = losses.mean()
        return loss, {"loss": loss.detach()}

    return output, mean


def train(run: dict) -> dict:
    pipeline, tensor = run.get("pipeline", False), run.get("tensor", False)
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world if tensor else 1,
        pipeline_model_parallel_size=world if pipeline else 1,
    )
    model = build_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(VOCABULARY, (MICRO_BATCHES, BATCH, TOKENS + 1), generator=generator)
    losses = []  # the schedule has divided them by the number of micro-batches
    for _ in range(run.get("steps", 10)):
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(documents),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=TOKENS,
            micro_batch_size=BATCH,
            forward_only=False,
            adjust_tensor_shapes_fn=tensor_shapes(model) if pipeline else None,
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(result["loss"]) for result in results))
    parallel_state.destroy_model_parallel()
    widths = [sum(slot.shape[2:].numel() for slot in model.decoder.arrives)] if pipeline else []
    return {"losses": losses, "arrives": widths}


def main() -> None:
    use_cpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run in json.loads(sys.argv[1]):
        print("RESULT", json.dumps({**run, **train(run)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
