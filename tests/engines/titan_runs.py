"""Short runs of torchtitan's own trainer, one after another in the same processes.

    python titan_runs.py '[{"residual": "mhc", "pipeline": "1F1B"}, ...]'

RANK and WORLD_SIZE are set by the caller. Each rank that knows losses prints a line of JSON for each run.
"""

import json
import os
import sys
import tempfile
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from on_cpu import use_cpu
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from headwater.integrations.torchtitan import adamw, with_residual

BATCH, TOKENS = 4, 64
RATE = 1e-4  # at higher rates a run of random weights makes much of rounding
FAMILIES = {"llama3": llama3, "qwen3": qwen3, "deepseek_v3": deepseek_v3}
CHECKPOINTING = {"full": FullAC.Config(), "selective": SelectiveAC.Config(), "none": None}


class Documents(BaseDataLoader):
    """Rows of tokens that are easy to learn, the same ones in the same order under every layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        backwards: bool = False

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        self.backwards = config.backwards
        self.world, self.rank, self.rows = dp_world_size, dp_rank, local_batch_size
        self.batches = 0

    def __iter__(self):
        while True:
            first = (self.batches * self.world + self.rank) * self.rows
            self.batches += 1
            rows = torch.stack([document(first + row) for row in range(self.rows)])
            if self.backwards:
                rows = rows.flip(0)
            yield {"input": rows[:, :-1]}, rows[:, 1:].contiguous()

    def state_dict(self):
        return {"rows": self.batches * self.world * self.rows}

    def load_state_dict(self, state):
        self.batches = state["rows"] // (self.world * self.rows)


def document(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    start, step = torch.randint(1, 64, (2,), generator=generator)
    return (start + step * torch.arange(TOKENS + 1)) % 512


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 2048


class Losses(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.losses = []

    def log(self, step, global_avg_loss, *_, **__):
        self.losses.append(round(float(global_avg_loss), 7))


def spec_of(run: dict):
    spec = FAMILIES[run.get("family", "llama3")].model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if run.get("residual") is not None:
        spec = with_residual(spec, run["residual"])
    return spec


def config_of(run: dict, folder: str) -> Trainer.Config:
    spec = spec_of(run)
    world = dist.get_world_size()
    layout = {"spmd_backend": "partial_dtensor"}
    shard = 1
    if "pipeline" in run:
        layout["pipeline_parallel_degree"] = world
        layout["pipeline_parallel_schedule"] = run["pipeline"]
        layout["pipeline_parallel_microbatch_size"] = 1
    elif run.get("tensor"):
        layout["tensor_parallel_degree"] = world
    else:
        shard = world
    layout["data_parallel_shard_degree"] = shard
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    rate, dtype = run.get("rate", RATE), run.get("dtype", "float32")
    optimizer = default_adamw(lr=rate)
    if run.get("adamw"):
        optimizer = adamw(spec, lr=rate)
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        model_spec=spec,
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=Documents.Config(backwards=run.get("backwards", False)),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH // shard,
            seq_len=TOKENS,
            steps=run.get("steps", 20),
            disable_cuda_graphs=True,
            dtype=dtype,
            mixed_precision_param=dtype,
            mixed_precision_reduce=dtype,
        ),
        metrics=Losses.Config(log_freq=1),
        parallelism=ParallelismConfig(**layout),
        checkpoint=CheckpointManager.Config(
            enable="folder" in run,
            interval=10,
            last_save_model_only=False,
            load_step=run.get("load_step", -1),
        ),
        activation_checkpoint=CHECKPOINTING[run.get("checkpointing", "none")],
        compile=CompileConfig(enable=run.get("compile", False), backend="aot_eager"),
        validator=Validator.Config(enable=False),
    )


def refill(part: torch.nn.Module) -> None:
    """Give a part weights that depend on their names alone, and the residual a state as after training."""
    for name, parameter in part.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if name.startswith("residual."):
            distributed = isinstance(parameter, DTensor)
            start = parameter.detach().full_tensor() if distributed else parameter.detach()
            values = start + 0.1 * noise
        elif parameter.ndim == 1:
            values = 1 + 0.1 * noise
        elif name.startswith("tok_embeddings."):
            values = noise  # as torchtitan starts them
        else:
            values = 0.02 * noise
        if isinstance(parameter, DTensor):
            values = distribute_tensor(
                values, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            parameter.copy_(values)


def sent_by(parts: list) -> list:
    """Tensors that each hop to a stage of this rank carries, and those that its state has."""
    ports = [part.port for part in parts if getattr(part, "port", None) is not None]
    return [[len(port.hop.arrives), len(port.hop.state)] for port in ports]


def train(run: dict) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        trainer = config_of(run, run.get("folder", scratch)).build()
        for part in trainer.model_parts:
            refill(part)
        trainer.train()
        parts = trainer.model_parts
        result = {"losses": trainer.metrics_processor.losses, "hops": sent_by(parts)}
        trainer.close()
    return result


def main() -> None:
    use_cpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    single = torch.Tensor.float
    TORCH_DTYPE_MAP["float64"] = torch.float64
    for run in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        # torchtitan rounds positions and logits to fp32.
        torch.Tensor.float = torch.Tensor.double if run.get("dtype") == "float64" else single
        print("RESULT", json.dumps({**run, **train(run), "rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    main()
