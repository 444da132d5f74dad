"""Trains many arms side by side on one GPU until a deadline, the most useful runs first, and packs what they measured.

    PYTHONPATH=.:studies/better-residual python studies/better-residual/screen.py --tokens DIR --out DIR --minutes 8

The first seeds of all arms come first, seed by seed; later seeds begin with the baselines, and go on with the arm whose
runs so far end lowest. A run that dies is noted and not begun again. Beside the archive of all runs, results.jsonl has
a line for each run as soon as it ends. Processes on one GPU compute in turns unless NVIDIA's multi-process service
runs. Start that service first: `nvidia-cuda-mps-control -d`.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwater.models import Decoder, ModelConfig
from headwater.runs.settings import Config, DataSettings, OptimSettings, TrainSettings

BASELINES = {
    "standard": "standard",
    "block": "attnres-block",
    "full": "attnres-full",
    "muddformer": "muddformer:norm=true",
}
TOKEN = "block-reads:inputs=three,bias=true,token=16"
ARMS = {
    **BASELINES,
    "three": "block-reads:inputs=three",
    "token": "block-reads:token=16",
    "three-token": TOKEN,
    "added": f"{TOKEN},form=added,values=normed",
    "three-normed": f"{TOKEN},values=normed",
    "bias": "block-reads:bias=true",
    "two": "block-reads:inputs=two",
    "plain-keys": "attnres-block:key_weight=false",
    "three-opening": f"{TOKEN},token_at=opening",
    "three-difference": "block-reads:inputs=three,bias=true,form=difference",
    "difference": "block-reads:bias=true,form=difference",
    "three-bias": "block-reads:inputs=three,bias=true",
    "normed": "block-reads:bias=true,values=normed",
    "written": "block-reads:write_norm=true",
    "growing": "block-reads:blocks=growing",
}
BATCH = 32
VOCAB = 8192
KEPT = ("config.json", "launch.json", "metrics.jsonl", "summary.json", "diverged.json", "log.txt")
SAVING_SECONDS = 15  # for runs that are stopped to save and end


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.arm}-rate-{self.rate:g}-seed-{self.seed}"


@dataclass
class Active:
    run: Run
    process: subprocess.Popen[bytes]
    began: float


def steps_for(size: str, ratio: float) -> int:
    """Steps that see `ratio` tokens for each parameter of the plain model between embedding and head."""
    config = ModelConfig.named(size, vocab_size=VOCAB)
    counts = Decoder(config).parameter_count()
    inner = counts["total"] - 2 * counts["embedding"]
    return math.ceil(ratio * inner / (BATCH * config.context))


def config_of(run: Run, options: argparse.Namespace, steps: int) -> Config:
    config = Config(
        model=ModelConfig.named(options.size, residual=ARMS[run.arm]),
        data=DataSettings(source=(str(options.tokens),)),
        optim=OptimSettings(lr=run.rate, warmup=100),
        train=TrainSettings(
            steps=steps,
            batch_size=BATCH,
            seed=run.seed,
            device=options.device,
            deterministic=False,
            log_every=46,
            eval_every=max(1, steps // 4),
            eval_windows=512,
            depth_every=steps,
            save_every=10**6,
        ),
    )
    if options.tiny:
        model = replace(
            config.model, context=32, layers=12, dim=32, heads=2, kv_heads=2, mlp_dim=64
        )
        train = replace(config.train, batch_size=4, eval_windows=4, log_every=2)
        config = replace(config, model=model, train=train)
    return config


def launch(run: Run, options: argparse.Namespace, steps: int) -> Active:
    folder = options.work / "runs" / run.name
    settings = options.work / "settings" / f"{run.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(json.dumps(asdict(config_of(run, options, steps))))
    command = [sys.executable, "-m", "headwater.cli", "train", "--plugin", "arms"]
    command += ["--config", str(settings), "--out", str(folder)]
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
        )
    return Active(run, process, time.monotonic())


def runs_in_order(options: argparse.Namespace, losses: dict[str, list[float]]) -> Iterator[Run]:
    """Every run; the order of later seeds is settled when the first of them is asked for."""
    for place, seed in enumerate(options.seeds):
        arms = list(options.arms)
        if place >= options.first:
            baselines = [arm for arm in arms if arm in BASELINES]
            others = [arm for arm in arms if arm not in BASELINES and losses.get(arm)]
            others.sort(key=lambda arm: statistics.fmean(losses[arm]))
            arms = baselines + others
        for arm in arms:
            for rate in options.rates:
                yield Run(arm, seed, rate)


def conclude(active: Active, options: argparse.Namespace, losses: dict[str, list[float]]) -> None:
    """Writes down how a run ended, and drops its weights."""
    run, folder = active.run, options.work / "runs" / active.run.name
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    wall = time.monotonic() - active.began
    line: dict[str, Any] = {"run": run.name, **asdict(run), "wall": wall}
    summary = folder / "summary.json"
    if summary.exists():
        line |= json.loads(summary.read_text())
        losses.setdefault(run.arm, []).append(line["bits_per_byte"])
        print(f"{run.name}: {line['bits_per_byte']:.4f} in {wall:.0f} s", flush=True)
    else:
        words = (folder / "log.txt").read_text(errors="replace")[-600:]
        line |= {"failed": active.process.returncode, "said": words}
        print(f"{run.name}: failed ({active.process.returncode}): {words[-300:]}", flush=True)
    with (options.out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def train_all(options: argparse.Namespace, steps: int) -> None:
    deadline = time.monotonic() + 60 * options.minutes
    losses: dict[str, list[float]] = {}
    walls: list[float] = []
    waiting = runs_in_order(options, losses)
    active: list[Active] = []
    exhausted = False
    while (active or not exhausted) and time.monotonic() < deadline:
        # A run that would be cut off half way takes the GPU from those that can end.
        soon = statistics.median(walls) / 2 if walls else 0
        if len(active) < options.jobs and not exhausted and time.monotonic() + soon < deadline:
            run = next(waiting, None)
            exhausted = run is None
            if run is not None:
                active.append(launch(run, options, steps))
        time.sleep(0.5)
        for job in list(active):
            if job.process.poll() is not None:
                active.remove(job)
                walls.append(time.monotonic() - job.began)
                conclude(job, options, losses)
        if not active and time.monotonic() + soon >= deadline:
            break
    stop(active)
    for job in active:
        conclude(job, options, losses)


def stop(active: list[Active]) -> None:
    for job in active:
        job.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + SAVING_SECONDS
    for job in active:
        try:
            job.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


def pack(options: argparse.Namespace) -> None:
    """All runs without their weights, as one archive."""
    with tarfile.open(options.out / f"{options.name}.tar.xz", "w:xz") as archive:
        for folder in sorted((options.work / "runs").iterdir()):
            for name in KEPT:
                if (folder / name).exists():
                    archive.add(folder / name, f"{options.name}/runs/{folder.name}/{name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="screening")
    parser.add_argument("--tokens", type=Path, required=True, help="a folder that prepare() made")
    parser.add_argument("--out", type=Path, required=True, help="where archive and results go")
    parser.add_argument("--work", type=Path, required=True, help="where runs are made")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--first", type=int, default=2, help="seeds that every arm has in turn")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.011])
    parser.add_argument("--size", default="ladder-2m")
    parser.add_argument("--ratio", type=float, default=10, help="tokens a parameter")
    parser.add_argument("--steps", type=int, help="instead of --ratio")
    parser.add_argument("--jobs", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    return parser.parse_args()


def main() -> None:
    options = parse()
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    steps = options.steps or steps_for(options.size, options.ratio)
    print(f"{len(options.arms)} arms, {steps} steps a run", flush=True)
    began = time.monotonic()
    train_all(options, steps)
    pack(options)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
