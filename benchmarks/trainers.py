"""Tokens per second of whole trainers on one GPU: ours, a loop like nanoGPT's, and the Trainer of transformers.

    python -m benchmarks.trainers --out FILE               # one H200, at most 5 minutes
    python -m benchmarks.trainers --sizes tiny --device cpu --rounds 1 --steps 2  # numbers mean nothing

All have models of one shape, bf16 autocast over fp32 weights, a fused AdamW and clipped gradients:
`headwater` is our trainer with the plain residual, `headwater-block` with Block Attention Residuals,
`loop` is like nanoGPT's train.py around a plain Llama, and `transformers` its Trainer with torch_compile.
The trainers take turns in one process, each after as many steps that do not count. A trainer shows no
speed if its first loss is far from that of uniform guesses, or if its model has another size.
"""

import argparse
import json
import math
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from .measure import provenance
from .speed import SIZES, VOCABULARY, Arm

TRAINERS = ("headwater", "headwater-block", "loop", "transformers")
RESIDUALS = {"headwater": "standard", "headwater-block": "attnres-block"}
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
ROUNDS, STEPS = 5, 20
LOSS_GATE, SIZE_GATE = 0.05, 0.01  # relative
STARTS_WITHIN = 0.75  # of a size's time: the rest is for the rounds


class Layer(nn.Module):
    """A layer as Llama has it, in PyTorch's own operators."""

    def __init__(self, dim: int, heads: int, kv_heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.heads = (heads, kv_heads, kv_heads)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.qkv = nn.Linear(dim, sum(self.heads) * dim // heads, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * mlp_dim, bias=False)
        self.down = nn.Linear(mlp_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        q, k, v = heads.split(self.heads, 1)  # (B, H, T, C)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """The model of the plain loop: windows of one token more than the context, to the loss."""

    def __init__(self, dim: int, layers: int, context: int, heads: int, **shape: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, **shape) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        rates = 10000.0 ** -torch.arange(0, 1, 2 * heads / dim)
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for matrix in (weight for weight in self.parameters() if weight.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), windows[:, 1:].flatten())


class PlainLoop:
    """The loop of nanoGPT's train.py, which compiles the whole model; windows are made on the GPU."""

    def __init__(self, size: str, device: str) -> None:
        shape, windows = SIZES[size]
        self.shape, self.device = (windows, shape["context"] + 1), device
        self.tokens = windows * shape["context"]  # per step
        self.model = Llama(**shape).to(device)
        self.compiled = torch.compile(self.model) if device == "cuda" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW, fused=True)
        count = sum(weight.numel() for weight in self.model.parameters())
        self.record = {"first_loss": float(self.step()), "parameters": count}

    def step(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.compiled(torch.randint(VOCABULARY, self.shape, device=self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def go(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait(self.device)
        return steps * self.tokens / (time.perf_counter() - began)


class Turns(hf.TrainerCallback):
    """Let `Trainer.train`, in a thread of its own, take as many steps as each turn asks for."""

    def __init__(self, device: str) -> None:
        self.requests: queue.Queue[int] = queue.Queue()
        self.ended: queue.Queue[None] = queue.Queue()
        self.device, self.remaining = device, 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.remaining == 0:
            self.remaining = self.requests.get()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            wait(self.device)
            self.ended.put(None)


class Transformers:
    """LlamaForCausalLM in the Trainer of transformers."""

    def __init__(self, size: str, folder: Path, device: str) -> None:
        shape, windows = SIZES[size]
        self.tokens = windows * shape["context"]  # per step
        config = hf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=shape["dim"], intermediate_size=shape["mlp_dim"],
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["context"],
            use_cache=False,
        )  # fmt: skip
        model = hf.LlamaForCausalLM(config).to(device)
        settings = hf.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=windows, max_steps=10**6,
            bf16=True, torch_compile=device == "cuda", optim="adamw_torch_fused",
            learning_rate=ADAMW["lr"], weight_decay=ADAMW["weight_decay"], max_grad_norm=1.0,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=device == "cpu",
        )  # fmt: skip
        rows = torch.randint(VOCABULARY, (4096, shape["context"]))
        examples = [{"input_ids": row, "labels": row} for row in rows]
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            batch = rows[:1].to(device)
            first_loss = float(model(batch, labels=batch).loss)
        self.record = {"first_loss": first_loss, "parameters": model.num_parameters()}
        self.turns = Turns(device)
        trainer = hf.Trainer(model, settings, train_dataset=examples, callbacks=[self.turns])
        threading.Thread(target=trainer.train, daemon=True).start()
        self.go(1)

    def go(self, steps: int) -> float:
        began = time.perf_counter()
        self.turns.requests.put(steps)
        self.turns.ended.get(timeout=240)
        return steps * self.tokens / (time.perf_counter() - began)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def trainer_of(name: str, size: str, folder: Path, device: str) -> Any:
    if name in RESIDUALS:
        return Arm(RESIDUALS[name], size, folder, device)
    if name == "loop":
        return PlainLoop(size, device)
    return Transformers(size, folder / size / name, device)


def measure(size: str, flags: argparse.Namespace, folder: Path, ends: float) -> dict[str, Any]:
    """Build the trainers of a size one after another, then let them take turns until `ends`."""
    began = time.monotonic()
    results: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    trainers: dict[str, Any] = {}
    for name in TRAINERS:
        if time.monotonic() > began + STARTS_WITHIN * (ends - began):
            results[name] = {"failed": "no time was left for it"}
            continue
        torch.compiler.reset()
        trainer = trainer_of(name, size, folder, flags.device)
        results[name] = dict(trainer.record)
        print(size, name, results[name], file=sys.stderr, flush=True)
        if alike(results[name], results[TRAINERS[0]]):
            trainers[name], rates[name] = trainer, []
        else:
            results[name]["failed"] = "its first loss or its number of parameters is another"
    for number in range(flags.rounds):
        if number > 0 and time.monotonic() > ends:
            break
        for name in trainers:
            trainers[name].go(flags.steps)
            rates[name].append(trainers[name].go(flags.steps))
    for name, measured in rates.items():
        rate = statistics.median(measured)
        results[name] |= {"tokens_per_second": rate, "least": min(measured), "most": max(measured)}
    return results


def alike(record: dict[str, Any], first: dict[str, Any]) -> bool:
    """Compare the loss with that of uniform guesses, and the size with the first trainer's model."""
    loss = record["first_loss"] / math.log(VOCABULARY)
    size = record["parameters"] / first["parameters"]
    return abs(loss - 1) < LOSS_GATE and abs(size - 1) < SIZE_GATE


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--sizes", nargs="+", default=["50m", "342m"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per turn")
    parser.add_argument("--minutes", type=float, default=5, help="time for all sizes together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    began = time.monotonic()
    result = provenance(" ".join(["python -m benchmarks.trainers", *sys.argv[1:]]), flags.device)
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(flags.sizes, 1):
            ends = began + 60 * flags.minutes * number / len(flags.sizes)
            result[size] = measure(size, flags, Path(folder), ends)
            if flags.out:
                flags.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
