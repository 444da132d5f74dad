"""Is it worth converting a trained model? Train a plain one, convert it, and continue both on equal tokens.

    python studies/continue-converted/run.py            # two CPU cores, about twenty minutes
    python studies/continue-converted/run.py --dtype bfloat16 --device cuda --jobs 8   # results-bfloat16.json

Writes results.json (every validation loss) and figure.svg beside this file, or to `--out`, anew after each arm. The
arms see the same batches in the same order under the same schedule; only the residual differs, and in the last arm what
is trained: with the base frozen, the queries alone. `--arms` makes some of them, and keeps the others of a file with
the same settings.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

import headwater
from headwater import hf
from headwater.runs.settings import Config, ModelConfig, OptimSettings, TrainSettings
from headwater.train.checkpoint.folder import load_model
from headwater.train.data.dataset import Windows, prepare
from headwater.train.loop import train

HERE = Path(__file__).parent
QUERIES = "attnres-block, queries alone"
ARMS = ("standard", "attnres-block", "attnres-full", QUERIES)
LAYERS, BATCH, LR, EVERY = 8, 8, 3e-3, 50
QUERY_LR = 1e-2  # of the arm that trains nothing else: queries start at zero, and have far to go


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="of the first training, and again of each arm"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/continue-converted"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the continued weights",
    )
    parser.add_argument(
        "--device", default="cpu", help="a CPU without bf16 takes minutes a step in it"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="trainings at a time, each in a process of its own"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    flags = parser.parse_args()
    if flags.steps % EVERY:
        parser.error(
            f"--steps must be a multiple of {EVERY}, at which losses are taken, got {flags.steps}"
        )
    cases = [(arm, seed, flags) for arm in flags.arms for seed in range(flags.seeds)]
    curves: dict[str, list[list[float]]] = {}
    with workers(flags.jobs) as each:
        list(each(train_plain, [(seed, flags) for seed in range(flags.seeds)]))
        for (arm, _, _), losses in zip(cases, each(train_arm, cases), strict=True):
            curves.setdefault(arm, []).append(losses)
            if len(curves[arm]) == flags.seeds:
                write(
                    {name: runs for name, runs in curves.items() if len(runs) == flags.seeds}, flags
                )


@contextmanager
def workers(jobs: int) -> Iterator[Callable[..., Iterable]]:
    """`map` over so many processes. They start at once, so that all have imported torch when the arms begin."""
    if jobs == 1:
        yield map
        return
    with get_context("spawn").Pool(jobs) as pool:  # CUDA bears no fork
        yield pool.imap


def train_plain(case: tuple[int, argparse.Namespace]) -> None:
    seed, flags = case
    folder = flags.runs / f"plain-{seed}"
    train(
        plain_config(flags.steps, seed, flags.device),
        folder,
        resume=(folder / "config.json").exists(),
    )


def train_arm(case: tuple[str, int, argparse.Namespace]) -> list[float]:
    arm, seed, flags = case
    decoder, _ = load_model(flags.runs / f"plain-{seed}")
    base = hf.export(decoder.config.to_dict(), decoder.weights()).to(
        flags.device, getattr(torch, flags.dtype)
    )
    data = prepare(plain_config(flags.steps, seed, flags.device).data)
    windows = {
        split: data.windows(split, decoder.config.context) for split in ("train", "validation")
    }
    return continue_training(base, arm, windows, seed, flags.steps)


def write(curves: dict[str, list[list[float]]], flags: argparse.Namespace) -> None:
    steps, seeds, dtype = flags.steps, flags.seeds, flags.dtype
    name = "" if dtype == "float32" else f"-{dtype}"
    flags.out.mkdir(parents=True, exist_ok=True)
    file = flags.out / f"results{name}.json"
    setting = {
        "layers": LAYERS,
        "dim": 64,
        "batch": BATCH,
        "lr": LR,
        "query_lr": QUERY_LR,
        "first_steps": steps,
    }
    before = json.loads(file.read_text()) if file.exists() else {}
    kept = (
        before.get("validation_loss", {})
        if before.get("setting") == setting and before["seeds"] == seeds
        else {}
    )
    found = kept | curves
    results = {
        "command": f"python studies/continue-converted/run.py --steps {steps} --seeds {seeds} --dtype {dtype}",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if flags.device.startswith("cuda") else "cpu",
        "headwater": headwater.__version__,
        "setting": setting,
        "seeds": seeds,
        "steps": [0, *range(EVERY, steps + 1, EVERY)],
        "validation_loss": {arm: found[arm] for arm in ARMS if arm in found},
    }
    file.write_text(json.dumps(results, indent=1) + "\n")
    (flags.out / f"figure{name}.svg").write_text(draw(results))


def plain_config(steps: int, seed: int, device: str) -> Config:
    return Config(
        model=ModelConfig.named("deep", layers=LAYERS),
        optim=OptimSettings(lr=2 * LR, warmup=20),
        train=TrainSettings(
            steps=steps,
            batch_size=BATCH,
            seed=seed,
            eval_every=steps,
            depth_every=steps,
            save_every=steps,
            device=device,
            compile="none",  # which would take longer than the steps
        ),
    )


def continue_training(
    base, arm: str, windows: dict[str, Windows], seed: int, steps: int
) -> list[float]:
    """Validation losses before, and after every so many steps."""
    model = base
    if arm != "standard":
        print(str(hf.convert(model, arm.partition(",")[0])).splitlines()[0], flush=True)
    if arm == QUERIES:
        hf.trainable(model, only=True)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if p.dim() == 2 and "residual." not in name]
    rest = [p for name, p in trained.items() if p.dim() != 2 or "residual." in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    lr = QUERY_LR if arm == QUERIES else LR
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95)
    )
    losses = [evaluate(model, windows["validation"])]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                lr * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            )
        rows = torch.from_numpy(windows["train"].batch(seed=1000 + seed, step=step, size=BATCH))
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            losses.append(evaluate(model, windows["validation"]))
            print(f"seed {seed} {arm:14} step {step + 1}: {losses[-1]:.4f}", flush=True)
    return losses


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.to(model.device)
    logits = model(rows[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, windows: Windows) -> float:
    rows = torch.from_numpy(windows.take(windows.spread(64)))
    return float(loss_of(model, rows))


LIGHT = {
    "standard": "#6b6b6b",
    "attnres-block": "#1f6feb",
    "attnres-full": "#c23a4d",
    QUERIES: "#1f7f48",
}
DARK = {
    "standard": "#a8a8a8",
    "attnres-block": "#74b3f5",
    "attnres-full": "#f08a96",
    QUERIES: "#62cf92",
}


def draw(results: dict) -> str:
    """Mean validation loss of each arm over its continued steps."""
    steps, width, height, left, top = results["steps"], 560, 300, 60, 20
    means = {
        arm: [sum(v) / len(v) for v in zip(*runs)]
        for arm, runs in results["validation_loss"].items()
    }
    low, high = min(min(v) for v in means.values()), max(max(v) for v in means.values())

    def place(step, loss):
        x = left + (width - left - 20) * step / steps[-1]
        return f"{x:.1f},{top + (height - top - 50) * (high - loss) / (high - low):.1f}"

    box, font = f'viewBox="0 0 {width} {height}"', 'font-family="sans-serif" font-size="13"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>']
    light, dark = (
        " ".join(f".c{ARMS.index(arm)} {{ color: {c} }}" for arm, c in a.items())
        for a in (LIGHT, DARK)
    )
    dark = f"@media (prefers-color-scheme: dark) {{ text {{ fill: #e2e2e2 }} {dark} }}"
    parts.append(
        f"<style>text {{ fill: #222222 }} .named {{ fill: currentColor }} {light} {dark}</style>"
    )
    for row, (arm, losses) in enumerate(means.items()):
        points = " ".join(place(step, loss) for step, loss in zip(steps, losses, strict=True))
        line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"/>'
        below = height - 56 - 16 * (len(means) - 1 - row)  # on the left, where no curve comes
        name = f'<text x="{left + 12}" y="{below}" class="named">{arm}: {losses[-1]:.4f}</text>'
        parts.append(f'<g class="c{ARMS.index(arm)}">{line}{name}</g>')
    parts.append(
        f'<text x="6" y="{top + 10}">{high:.3f}</text><text x="6" y="{height - 36}">{low:.3f}</text>'
    )
    parts.append(
        f'<text x="{left}" y="{height - 10}">continued steps, 0 to {steps[-1]}; validation loss, nats per byte</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
