"""Tokens per second and peak memory of real training steps on one GPU, and what a checkpoint costs the loop.

    python -m benchmarks.training --out FILE                  # about 350 million parameters, bf16, about 25 minutes
    python -m benchmarks.training --preset tiny --out FILE    # the same on a CPU in a minute: numbers mean nothing

The functions measured are the trainer's own (begin, accumulate, update, save), over the trainer's own data path. Arms,
for the plain residual and Block Attention Residuals: `plain`, one process as `headwater train` runs it; `fsdp`, wrapped
by FSDP2 in a grid of one process, which shows what the wrapping costs by itself; `compiled`, by torch.compile;
`recompute`, activation checkpointing; `fsdp-compiled` and `fsdp-recompute`, both of each. Then `save`, `async-save` and
`compiled-async-save`: a checkpoint every `interval` steps, and the share of the loop's time that it takes. An arm is a
process with its own time limit; results are stored after each. An arm whose first loss differs from `plain`'s shows no
speed.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headwater.runs.settings import (
    Config,
    DataSettings,
    ModelConfig,
    OptimSettings,
    ParallelSettings,
    TrainSettings,
)
from headwater.train.distributed.ranks import Ranks, join
from headwater.train.loop import accumulate, update
from headwater.train.run import Run, begin, choose_device, peak_memory, save

from .measure import provenance

RESIDUALS = ("standard", "attnres-block")
STEP_ARMS: dict[str, dict[str, bool]] = {  # what TrainSettings changes
    "plain": {},
    "fsdp": {},
    "compiled": {"compile": True},
    "fsdp-compiled": {"compile": True},
    "recompute": {"checkpoint_activations": True},
    "fsdp-recompute": {"checkpoint_activations": True},
}
SAVE_ARMS: dict[str, dict[str, bool]] = {
    "save": {},
    "async-save": {"async_save": True},
    "compiled-async-save": {"compile": True, "async_save": True},
}
ROUNDS = 6  # of an interval with a save and one without; an even number, as their order matters
GATE = 0.01  # relative difference allowed between first losses: they are sums in bf16


@dataclass(frozen=True)
class Preset:
    model: ModelConfig
    windows: int
    device: str
    warmup: int
    steps: int
    interval: int
    """Steps between two checkpoints."""


PRESETS = {
    "350m": Preset(
        ModelConfig(
            dim=1024, layers=24, heads=16, kv_heads=16, mlp_dim=2816, context=2048, vocab_size=32768,
            tie_embeddings=True,
        ),
        windows=8, device="cuda", warmup=4, steps=12, interval=100,
    ),
    "tiny": Preset(
        ModelConfig(dim=32, layers=2, heads=2, kv_heads=2, mlp_dim=64, context=32), windows=4, device="cpu",
        warmup=1, steps=3, interval=4,
    ),
}  # fmt: skip


def main() -> None:
    flags = parse()
    if flags.arm:
        print(json.dumps(measure(flags, *flags.arm.split("/"))))
        return
    began = time.monotonic()
    result: dict[str, Any] = provenance(
        " ".join(["python -m benchmarks.training", *sys.argv[1:]]), device_of(flags)
    )
    result |= {
        "preset": flags.preset,
        "tokens_per_step": tokens_of(PRESETS[flags.preset]),
        "arms": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus")
        for arm in arms_of(flags):
            remaining = flags.budget - (time.monotonic() - began)
            result["arms"].append(
                {"arm": arm, **run_arm(arm, folder, flags, min(flags.limit, remaining))}
            )
            check(result["arms"])
            print(json.dumps(result["arms"][-1]), flush=True)
            if flags.out:
                flags.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="350m")
    parser.add_argument("--residuals", nargs="+", default=RESIDUALS)
    parser.add_argument("--only", nargs="+", help="leave out other arms; a name, or residual/name")
    parser.add_argument("--limit", type=float, default=200, help="seconds for each arm")
    parser.add_argument(
        "--budget", type=float, default=2000, help="seconds for all; arms beyond them are left out"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def arms_of(flags: argparse.Namespace) -> list[str]:
    """residual/arm; the longest come last."""
    arms = [f"{residual}/{arm}" for residual in flags.residuals for arm in (*STEP_ARMS, *SAVE_ARMS)]
    names = {arm: {arm, arm.split("/")[1]} for arm in arms}
    if unknown := set(flags.only or ()) - set().union(*names.values()):
        raise SystemExit(
            f"unknown arms {', '.join(sorted(unknown))}. Valid arms: {', '.join(arms)}"
        )
    chosen = [arm for arm in arms if not flags.only or names[arm] & set(flags.only)]
    return sorted(chosen, key=lambda arm: arm.split("/")[1] in SAVE_ARMS)


def device_of(flags: argparse.Namespace) -> str:
    return PRESETS[flags.preset].device


def tokens_of(preset: Preset) -> int:
    assert preset.model.context is not None
    return preset.windows * preset.model.context


def write_corpus(folder: Path) -> None:
    """A few megabytes of random letters, in documents as a corpus has them."""
    folder.mkdir()
    letters = random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(
            "".join(letters.choices("abcdefghijklmnopqrstuvwxyz \n", k=50_000))
        )


def run_arm(arm: str, folder: str, flags: argparse.Namespace, limit: float) -> dict[str, Any]:
    if limit < 10:
        return {"failed": "no time was left for it"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        "--arm",
        arm,
        "--folder",
        folder,
        "--preset",
        flags.preset,
    ]
    began = time.monotonic()
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {limit:.0f} s"}
    if process.returncode:
        return {"failed": (process.stderr.strip().splitlines() or ["no message"])[-1]}
    return {
        **json.loads(process.stdout.splitlines()[-1]),
        "wall_seconds": round(time.monotonic() - began, 1),
    }


def check(arms: list[dict[str, Any]]) -> None:
    """The newest arm must start from the loss of its residual's first one."""
    newest, name = arms[-1], arms[-1]["arm"]
    residual = name.split("/")[0]
    first = next(
        (arm for arm in arms if arm["arm"].split("/")[0] == residual and "loss" in arm), None
    )
    if (
        first
        and "loss" in newest
        and abs(newest["loss"] - first["loss"]) > GATE * abs(first["loss"])
    ):
        newest.clear()
        newest |= {
            "arm": name,
            "failed": "its first loss differs from that of the residual's first arm",
        }


def measure(flags: argparse.Namespace, residual: str, arm: str) -> dict[str, Any]:
    preset = PRESETS[flags.preset]
    config = config_of(preset, residual, flags.folder, arm)
    ranks = grid_of_one(config) if arm.startswith("fsdp") else Ranks()
    run = begin(config, flags.folder / f"{residual}-{arm}", resume=False, ranks=ranks)
    loss = step(run)
    for _ in range(preset.warmup):
        step(run)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(timed(run) for _ in range(preset.steps))
    median = seconds[len(seconds) // 2]
    record = {
        "parameters": run.whole.parameter_count()["total"],
        "loss": loss,
        "step_ms": {
            "median": 1e3 * median, "p20": 1e3 * seconds[len(seconds) // 5], "p80": 1e3 * seconds[-len(seconds) // 5]
        },
        "tokens_per_second": tokens_of(preset) / median,
        "peak_memory_gib": peak_memory(run.device) / 2**30,
    }  # fmt: skip
    if arm in SAVE_ARMS:
        record |= saving(run, preset.interval)
    run.log.close()
    if not ranks.alone:
        torch.distributed.destroy_process_group()
    return record


def config_of(preset: Preset, residual: str, folder: Path, arm: str) -> Config:
    changes = (STEP_ARMS | SAVE_ARMS)[arm]
    return Config(
        model=replace(preset.model, residual=residual),
        data=DataSettings(source=(str(folder / "corpus"),), cache=str(folder / "cache")),
        optim=OptimSettings(lr=3e-4),
        train=replace(
            TrainSettings(steps=1000, batch_size=preset.windows, device=preset.device, keep=1),
            **changes,
        ),
        parallel=ParallelSettings(shard=1),
    )


def grid_of_one(config: Config) -> Ranks:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return join(config.parallel, choose_device(config), alone=False)


def step(run: Run) -> float:
    """Step as the training loop does: the host reads loss and gradient norm, and waits for the GPU."""
    loss = accumulate(run, run.step + 1)
    update(run, run.step + 1, loss)
    run.step += 1
    return loss


def timed(run: Run) -> float:
    began = time.perf_counter()
    step(run)
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def saving(run: Run, interval: int) -> dict[str, Any]:
    """A checkpoint at the start of an interval of steps, which ends when it is written, beside an interval without one,
    in turns: steps vary by more than a save costs. The first checkpoint, which allocates, is apart."""
    began = time.perf_counter()
    save(run)
    first = time.perf_counter() - began
    run.saver.wait()
    rounds: list[dict[str, float]] = []
    for number in range(ROUNDS):
        seconds: dict[str, float] = {}
        for kind in ("alone", "with") if number % 2 == 0 else ("with", "alone"):
            began = time.perf_counter()
            if kind == "with":
                save(run)
                seconds["blocked"] = time.perf_counter() - began
            for _ in range(interval):
                timed(run)
            run.saver.wait()
            seconds[kind] = time.perf_counter() - began
        rounds.append(seconds)
    alone, together, blocked = (
        sum(seconds[kind] for seconds in rounds) for kind in ("alone", "with", "blocked")
    )
    size = sum(
        file.stat().st_size for file in (run.folder / "checkpoints").rglob("*") if file.is_file()
    )
    return {
        "save": {
            "interval": interval,
            "bytes": size,
            "first_blocked_seconds": first,
            "seconds": rounds,
            "share_blocked": blocked / alone,
            "share_of_loop": together / alone - 1,
            "share_by_round": [seconds["with"] / seconds["alone"] - 1 for seconds in rounds],
        }
    }


if __name__ == "__main__":
    main()
