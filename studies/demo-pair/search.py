"""Searches the demo's configuration on CPU cores, one core a run, and confirms it on seeds that took no part.

    PYTHONPATH=. python studies/demo-pair/search.py --out DIR --work DIR --seconds 300 --cores 4-15

README.md has the rule. OUT/search.jsonl has a line for each run, and OUT/chosen.json the choice.
"""

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.models import ModelConfig
from headwater.runs.settings import Config, OptimSettings, TrainSettings

# Seconds for all of the demo's runs on two cores, and how many seeds it may have.
DEMO_SECONDS = 130
FEWEST, MOST = 3, 5
# Of Student's t, two-sided 95 %, by the number of seeds.
QUANTILE = {3: 4.303, 4: 3.182, 5: 2.776}

NARROW = {"dim": 32, "mlp_dim": 96, "heads": 2, "kv_heads": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"model": {"layers": 12, "context": 128}, "batch": 8, "steps": 180},
    "windows": {"model": {"layers": 12, "context": 64}, "batch": 8, "steps": 320},
    "narrow": {"model": {**NARROW, "layers": 16, "context": 128}, "batch": 8, "steps": 240},
    "deep": {"model": {**NARROW, "layers": 24, "context": 64}, "batch": 8, "steps": 300},
    "short": {"model": {"layers": 8, "context": 64}, "batch": 8, "steps": 300},
}
RATES = (5e-3, 1e-2)
FACTORS = (0.1, 1.0)
CHOOSING, CONFIRMING = (10, 11, 12), (0, 1, 2, 3, 4)


def config_of(shape: str, residual: str, rate: float, factor: float, seed: int) -> Config:
    values = SHAPES[shape]
    steps = values["steps"]
    return Config(
        model=ModelConfig.named("deep", residual=residual, **values["model"]),
        optim=OptimSettings(lr=rate, warmup=20, query_lr=factor),
        train=TrainSettings(
            steps=steps,
            batch_size=values["batch"],
            seed=seed,
            device="cpu",
            eval_every=math.ceil(steps / 4),
            eval_windows=8192 // values["model"]["context"],
            depth_every=math.ceil(steps / 4),
            save_every=steps,
            keep=1,
        ),
    )


class Search:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.cores: queue.Queue[int] = queue.Queue()
        for core in options.cores:
            self.cores.put(core)
        self.pool = ThreadPoolExecutor(len(options.cores))
        self.slowest = 0.0
        self.losses: dict[tuple[Any, ...], float] = {}
        self.seconds: dict[tuple[Any, ...], float] = {}

    def run(self, reserve: bool, *key: Any) -> None:
        """Train once, unless too little time is left, or would be left for the confirmation."""
        core = self.cores.get()
        try:
            needed = self.slowest * (2.3 if reserve else 1.05)
            left = self.deadline - time.monotonic()
            if left > needed:
                self.train(core, left, *key)
        finally:
            self.cores.put(core)

    def train(self, core: int, left: float, *key: Any) -> None:
        name = "-".join(str(part) for part in key)
        folder = self.options.work / name
        folder.mkdir(parents=True)
        settings = self.options.work / f"{name}.json"
        settings.write_text(json.dumps(asdict(config_of(*key))))
        command = [sys.executable, "-m", "headwater.cli", "train"]
        command += ["--config", str(settings), "--out", str(folder)]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            os.sched_setaffinity(process.pid, {core})
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.record(key, folder, time.monotonic() - began)

    def record(self, key: tuple[Any, ...], folder: Path, wall: float) -> None:
        line: dict[str, Any] = dict(zip(("shape", "residual", "rate", "factor", "seed"), key))
        line["wall"] = wall
        summary = folder / "summary.json"
        if summary.exists():
            line |= json.loads(summary.read_text())
            records = [json.loads(text) for text in (folder / "metrics.jsonl").open()]
            line["records"] = [r for r in records if r["kind"] in ("eval", "depth")]
            self.losses[key], self.seconds[key] = line["bits_per_byte"], wall
            self.slowest = max(self.slowest, wall)
            print(f"{key}: {line['bits_per_byte']:.4f} in {wall:.0f} s", flush=True)
        else:
            line["failed"] = (folder / "log.txt").read_text()[-600:]
            print(f"{key}: failed: {line['failed'][-300:]}", flush=True)
        with (self.options.out / "search.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def run_all(self, keys: list[tuple[Any, ...]], *, reserve: bool) -> None:
        list(self.pool.map(lambda key: self.run(reserve, *key), keys))

    def try_shapes(self, shapes: list[str]) -> None:
        plain = []
        for seed in CHOOSING:
            for shape in shapes:
                plain += [(shape, "standard", rate, 0.1, seed) for rate in RATES]
        self.run_all(plain, reserve=True)
        block = []
        for seed in CHOOSING:
            for shape in shapes:
                rate = self.best_rate(shape)
                if rate is not None:
                    block += [(shape, "attnres-block", rate, factor, seed) for factor in FACTORS]
        self.run_all(block, reserve=True)

    def best_rate(self, shape: str) -> float | None:
        """The rate at which the plain residual's mean loss is lowest."""
        means = {}
        for rate in RATES:
            losses = [self.losses.get((shape, "standard", rate, 0.1, seed)) for seed in CHOOSING]
            if None not in losses:
                means[rate] = statistics.fmean(losses)
        return min(means, key=means.__getitem__) if means else None

    def candidates(self) -> list[dict[str, Any]]:
        """What the choosing seeds say of each shape at the plain residual's best rate, by factor."""
        rows = []
        for shape in SHAPES:
            rate = self.best_rate(shape)
            for factor in FACTORS:
                row = self.row(shape, rate, factor, CHOOSING)
                if row:
                    rows.append(row)
        return rows

    def row(self, shape: str, rate: Any, factor: float, seeds: tuple[int, ...]) -> dict[str, Any]:
        plain = [(shape, "standard", rate, 0.1, seed) for seed in seeds]
        block = [(shape, "attnres-block", rate, factor, seed) for seed in seeds]
        if any(key not in self.losses for key in plain + block):
            return {}
        pairs = [self.losses[b] - self.losses[p] for b, p in zip(block, plain)]
        seconds = statistics.fmean(self.seconds[key] for key in plain)
        seconds += statistics.fmean(self.seconds[key] for key in block)
        return {
            "shape": shape,
            "rate": rate,
            "factor": factor,
            "seeds": max(FEWEST, min(MOST, int(DEMO_SECONDS / (seconds / 2)))),
            "differences": pairs,
            "mean": statistics.fmean(pairs),
            "sd": statistics.stdev(pairs),
            "seconds_of_a_pair": seconds,
        }

    def choose(self) -> dict[str, Any]:
        rows = self.candidates()
        pooled = math.sqrt(statistics.fmean(row["sd"] ** 2 for row in rows))
        for row in rows:
            half = QUANTILE[row["seeds"]] * pooled / math.sqrt(row["seeds"])
            row["ratio"] = -row["mean"] / half
        rows.sort(key=lambda row: -row["ratio"])
        print(json.dumps(rows, indent=1), flush=True)
        moving = [row for row in rows if row["factor"] == 1 and row["ratio"] >= 1.5]
        return (moving or rows)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cores", default="4-15")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to try the script")
    options = parser.parse_args()
    first, last = map(int, options.cores.split("-"))
    options.cores = range(first, last + 1)
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        for name in list(SHAPES)[2:]:
            del SHAPES[name]
        for values in SHAPES.values():
            values |= {"steps": 2, "batch": 2}
            values["model"] |= {"layers": 2, "context": 16}
    search = Search(options)
    names = list(SHAPES)
    # Twelve cores train two shapes at a time, so that the first ones are complete if time runs out.
    for first in range(0, len(names), 2):
        search.try_shapes(names[first : first + 2])
    chosen = search.choose()
    shape, rate, factor = chosen["shape"], chosen["rate"], chosen["factor"]
    fresh = []
    for seed in CONFIRMING:
        fresh.append((shape, "standard", rate, 0.1, seed))
        fresh.append((shape, "attnres-block", rate, factor, seed))
    search.run_all(fresh, reserve=False)
    confirmed = search.row(shape, rate, factor, CONFIRMING)
    result = {"chosen": chosen, "confirmed": confirmed}
    (options.out / "chosen.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
