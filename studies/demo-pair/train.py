"""Trains the pair, plain and Block Attention Residuals, side by side on one GPU in so many seconds.

    PYTHONPATH=. python studies/demo-pair/train.py --tokens DIR --out DIR --work DIR --seconds 285

Short runs of both come first: they fill the caches of compiled kernels and say how many steps fit. OUT then holds
standard.safetensors and attnres-block.safetensors, as headwater export writes them, and pair.tar.xz with the records.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from headwater.models import ModelConfig
from headwater.runs.settings import Config, DataSettings, OptimSettings, TrainSettings

PAIR = ("standard", "attnres-block")
TRIAL_STEPS = 400
SAVING_SECONDS = 12
KEPT = ("config.json", "model.json", "metrics.jsonl", "summary.json", "tokenizer.json", "log.txt")


def config_of(residual: str, options: argparse.Namespace, steps: int) -> Config:
    config = Config(
        model=ModelConfig.named("ladder-2m", residual=residual, tie_embeddings=True),
        data=DataSettings(source=(str(options.tokens),)),
        optim=OptimSettings(lr=6e-3, warmup=min(300, steps // 4), final_lr=0.03),
        train=TrainSettings(
            steps=steps,
            batch_size=32,
            device=options.device,
            deterministic=False,
            log_every=50,
            eval_every=max(1, steps // 16),
            eval_windows=256,
            depth_every=max(1, steps // 16),
            save_every=max(1, steps // 4),
            keep=1,
        ),
    )
    if options.tiny:
        model = replace(config.model, dim=32, heads=2, kv_heads=2, mlp_dim=64, context=64)
        train = replace(config.train, batch_size=2, eval_windows=4, log_every=1)
        config = replace(config, model=model, train=train)
    return config


def start(residual: str, options: argparse.Namespace, steps: int, kind: str) -> subprocess.Popen:
    folder = options.work / kind / residual
    folder.mkdir(parents=True)
    settings = options.work / f"{kind}-{residual}.json"
    settings.write_text(json.dumps(asdict(config_of(residual, options, steps))))
    command = [sys.executable, "-m", "headwater.cli", "train"]
    command += ["--config", str(settings), "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def train_both(options: argparse.Namespace, steps: int, kind: str, deadline: float) -> None:
    """Train both at once; those that are not done at the deadline save and end."""
    processes = [start(residual, options, steps, kind) for residual in PAIR]
    for process in processes:
        try:
            process.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
    for residual, process in zip(PAIR, processes):
        try:
            process.wait(SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log = options.work / kind / residual / "log.txt"
        print(f"{kind} {residual}: code {process.returncode}", log.read_text()[-500:], flush=True)


def seconds_of_a_step(options: argparse.Namespace) -> tuple[float, float]:
    """Seconds before the first step, and of a step, of the slower one, while both are at work."""
    starts, steps = [], []
    for residual in PAIR:
        path = options.work / "trial" / residual / "metrics.jsonl"
        records = [json.loads(line) for line in path.open()]
        training = [record for record in records if record["kind"] == "train"]
        first, last = training[len(training) // 2], training[-1]
        step = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        steps.append(step)
        starts.append(last["seconds"] - step * last["step"])
    return max(starts), max(steps)


def pack(options: argparse.Namespace) -> None:
    with tarfile.open(options.out / "pair.tar.xz", "w:xz") as archive:
        for residual in PAIR:
            for kind in ("pair", "trial"):
                for name in KEPT:
                    path = options.work / kind / residual / name
                    if path.exists():
                        archive.add(path, f"{kind}/{residual}/{name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, required=True, help="a folder that prepare() made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=285)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    train_both(options, 20 if options.tiny else TRIAL_STEPS, "trial", deadline)
    begin, step = seconds_of_a_step(options)
    left = deadline - time.monotonic()
    # Caches are warm now, so that the start takes less; a twentieth is for evaluations and for luck.
    steps = max(20, int(0.93 * (left - begin - SAVING_SECONDS) / step))
    if options.tiny:
        steps = 20
    print(f"{begin:.1f} s to begin, {1e3 * step:.2f} ms a step: {steps} steps", flush=True)
    train_both(options, steps, "pair", deadline - SAVING_SECONDS)
    for residual in PAIR:
        target = options.work / "exported" / residual
        export = [sys.executable, "-m", "headwater.cli", "export"]
        folder = options.work / "pair" / residual
        subprocess.run([*export, str(folder), "--out", str(target)], check=False)
        shutil.copy(target / "model.safetensors", options.out / f"{residual}.safetensors")
        shutil.copy(target / "config.json", options.work / "pair" / residual / "model.json")
    pack(options)


if __name__ == "__main__":
    main()
