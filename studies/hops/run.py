"""How many steps of reasoning can a depth take? Follow k links of a graph that is told in the prompt.

    PYTHONPATH=. python studies/hops/run.py --residual attnres-block --seed 0 --device cuda     # one run
    PYTHONPATH=. python studies/hops/run.py --small                     # half a minute on a CPU: too short to learn it

A prompt tells a random ring f of NODES nodes, a link (x, f(x)) a token, in random order, then asks QUESTIONS times, a
question (k, x) a token, k from 1 to HOPS, k = 1 most often: the answer is f^k(x), which is to be said there and never
shown. No link is told twice, so that k links need a chain of lookups, which a decoder can only make in depth; and one
ring, not several, so that x itself is never the answer, which would be a guess the better the more divisors k has. The
loss is of the answers alone. Accuracy is taken on fresh prompts, by k. All arms have the same width, depth, steps and
prompts; seed s draws the same prompts in every arm. A run is written to --out as one JSON file;
studies/attention-residuals/page.py makes a table of those in its runs/hops.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwater
from headwater.ops.cuda_graph import NotCaptured, record

WARM = 3  # steps before one is recorded


@dataclass(frozen=True)
class Task:
    nodes: int = 16
    hops: int = 8
    questions: int = 48
    dim: int = 128
    layers: int = 8
    steps: int = 3000
    batch: int = 256
    lr: float = 2e-3
    query_lr: float = 0.1
    every: int = 100  # steps between two losses that are kept

    @property
    def context(self) -> int:
        return self.nodes + self.questions

    @property
    def vocabulary(self) -> int:
        return self.nodes * (self.nodes + self.hops)


SMALL = Task(nodes=6, hops=2, questions=6, dim=64, layers=2, steps=300, batch=64)


def prompts(task: Task, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, context), answers (B, questions) and how many links each follows. The link from x to y
    is token nodes x + y, the question for k links from x token nodes (nodes + k - 1) + x."""
    device = generator.device

    def shuffled() -> Tensor:
        return torch.rand(count, task.nodes, device=device, generator=generator).argsort(-1)

    ring, order = shuffled(), shuffled()
    links = torch.empty_like(ring).scatter_(1, ring, ring.roll(-1, 1))
    told = task.nodes * order + links.gather(1, order)
    shape = (count, task.questions)
    start = torch.randint(task.nodes, shape, device=device, generator=generator)
    # Short chains more often: they are learned first
    often = 1 / torch.arange(1, task.hops + 1, device=device)
    hops = torch.multinomial(often, start.numel(), replacement=True, generator=generator).view(
        shape
    )
    answers, after = start, start
    for k in range(task.hops):
        after = links.gather(1, after)
        answers = torch.where(hops == k, after, answers)
    asked = task.nodes * (task.nodes + hops) + start
    return torch.cat((told, asked), -1), answers, hops + 1


def answers_of(model: Any, task: Task, tokens: Tensor) -> Tensor:
    """Logits over the nodes where a question has been asked, (B, questions, nodes), in fp32."""
    hidden = model.hidden(tokens)[:, task.nodes :]
    return model.head(hidden).float()[..., : task.nodes]


class Training:
    """Steps over tensors that stay where they are; on a GPU recorded, and then replayed."""

    def __init__(self, model: Any, task: Task, seed: int, device: str) -> None:
        self.model, self.task, self.device = model, task, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.tokens, self.answers, _ = prompts(task, task.batch, self.generator)
        self.loss = torch.zeros((), device=device)
        groups = headwater.param_groups(model, lr=task.lr, query_lr=task.query_lr)
        gpu = device == "cuda"
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=gpu, capturable=gpu)
        self.replay: Callable[[], None] = self.once

    def once(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(
            self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False
        ):
            logits = answers_of(self.model, self.task, self.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self.answers.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def step(self, number: int) -> None:
        share = min(1.0, (number + 1) / 100) * (
            0.55 + 0.45 * math.cos(math.pi * number / self.task.steps)
        )
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.task.lr * group["lr_factor"] * share)
        for mine, drawn in zip(
            (self.tokens, self.answers), prompts(self.task, self.task.batch, self.generator)
        ):
            mine.copy_(drawn)
        if number == WARM and self.device == "cuda":
            self.replay = self.recorded()
        self.replay()

    def recorded(self) -> Callable[[], None]:
        try:
            return record(self.once).replay
        except NotCaptured as reason:
            print(f"steps are not captured: {reason}")
            return self.once


@torch.no_grad()
def accuracy(model: Any, task: Task, device: str, batches: int = 16) -> list[float]:
    """The share of right answers for k = 1 to hops, on prompts that no training saw."""
    generator = torch.Generator(device).manual_seed(10**6)
    right, asked = torch.zeros(2, task.hops, dtype=torch.float64, device=device)
    for _ in range(batches):
        tokens, answers, hops = prompts(task, task.batch, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = answers_of(model, task, tokens).argmax(-1) == answers
        asked += (hops.flatten() - 1).bincount(minlength=task.hops)
        right += (hops.flatten() - 1).bincount(found.flatten().double(), minlength=task.hops)
    return (right / asked).tolist()


def run(task: Task, residual: str, seed: int, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    shape = {
        "dim": task.dim,
        "layers": task.layers,
        "heads": task.dim // 32,
        "kv_heads": task.dim // 32,
    }
    config = headwater.ModelConfig(
        vocab_size=task.vocabulary,
        mlp_dim=4 * task.dim,
        context=task.context,
        residual=residual,
        **shape,
    )
    model = headwater.Decoder(config).to(device)
    training, began, losses = Training(model, task, seed, device), time.perf_counter(), []
    for number in range(task.steps):
        training.step(number)
        if (number + 1) % task.every == 0:
            losses.append(float(training.loss))
    counts = model.parameter_count()
    return {
        "residual": residual, "seed": seed, "task": asdict(task), "accuracy": accuracy(model, task, device),
        "losses": losses, "seconds": time.perf_counter() - began, "parameters": counts["total"],
        "flops_per_token": model.flops_per_token(task.context), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--residual", default="standard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="6 nodes, up to 2 links, 2 layers")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="folder for the run's file")
    flags = parser.parse_args()
    task = SMALL if flags.small else Task()
    task = Task(**{**asdict(task), "steps": flags.steps or task.steps})
    found = run(task, flags.residual, flags.seed, flags.device)
    print(
        f"{flags.residual}, seed {flags.seed}: {', '.join(f'{value:.3f}' for value in found['accuracy'])}"
    )
    if flags.out:
        flags.out.mkdir(parents=True, exist_ok=True)
        name = f"{flags.residual.replace(':', '-')}-{flags.seed}.json"
        (flags.out / name).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
