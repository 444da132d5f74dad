"""Tokens per second of a user's run: the trainer's own steps on one GPU, all residuals in one process, taking turns.

    python -m benchmarks.speed --out FILE                                  # one H200, about 7 minutes
    python -m benchmarks.speed --sizes 50m --arms standard attnres-block   # a part of it
    python -m benchmarks.speed --arms standard mine --plugin my_module     # a residual of your own

Each is timed right after as many steps of its own that do not count, and every round begins with another arm: a GPU's
clock follows what ran before. An arm is a residual as `headwater train` runs it by default (CUDA graph, layers
compiled); NAME/model compiles the whole model instead, which is the default of long runs with residuals that have no
kernels. The better of the two plain ones is what others are measured against. `fla-attnres` is Block Attention
Residuals over fla's operator, which reads every source at every sublayer, in the same decoder. `fla-kda` is fla's own
KDA model, as wide and deep as ours with dense MLPs of the experts' active width, in a loop of its own.
`--cold` measures the first step in a fresh process with empty caches. An arm whose first loss is not that of the plain
residual shows no speed: at the start all of these predict nearly alike.

fla's kernels try their settings at first use, one compiled after the other, for many minutes; `--compile 12` lets 12
processes compile them side by side beforehand, each its share.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.models.config import SIZES as NAMED
from headwater.residuals import AttentionResidual, Norm, State, import_plugins, register
from headwater.runs.settings import Config, DataSettings, ModelConfig, TrainSettings
from headwater.train.loop import steps_of
from headwater.train.run import Run, begin

from .measure import provenance, times

SIZES: dict[str, tuple[dict[str, Any], int]] = {  # model, windows a step
    "50m": (
        {"dim": 512, "layers": 16, "heads": 8, "kv_heads": 4, "mlp_dim": 1408, "context": 1024},
        32,
    ),
    "342m": (
        {"dim": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "mlp_dim": 2816, "context": 2048},
        8,
    ),
    "14m": (
        {"dim": 256, "layers": 12, "heads": 4, "kv_heads": 4, "mlp_dim": 704, "context": 256},
        4,
    ),
    "tiny": ({"dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_dim": 128, "context": 64}, 4),
    # 93 million active parameters besides the embeddings
    "kimi": (dict(NAMED["kimi-linear-small"]), 8),
    # The study's
    **{name: (dict(shape), 32) for name, shape in NAMED.items() if name.startswith("ladder-")},
}
PLAIN = ("standard", "standard/model")
ARMS = (*PLAIN, "attnres-block", "attnres-full", "fla-attnres")
RIVALS = (
    "denseformer",
    "muddformer",
    "mhc",
    "hyper-connections",
    "deepcrossattention/model",
    "ddl/model",
)
DEFAULT = {
    "50m": (*ARMS, *RIVALS),
    "342m": (*PLAIN, "attnres-block"),
    "kimi": ("standard", "attnres-block", "fla-kda"),
    # On a CPU
    "14m": (
        "standard",
        *(f"{arm}{how}" for arm in ARMS[2:4] for how in ("", ":schedule=one-pass")),
    ),
    "tiny": ("standard", "attnres-block"),
    **dict.fromkeys(
        (name for name in SIZES if name.startswith("ladder-")),
        ("standard", "attnres-block", "attnres-full", "mhc", "denseformer", "muddformer"),
    ),
}
VOCABULARY, ROUNDS, STEPS, GATE = 8192, 7, 10, 0.05


@register("fla-attnres")
class FlaResidual(AttentionResidual):
    """Block Attention Residuals, each read by fla's operator over all sources, with the pre-norm folded in."""

    def __init__(self, dim: int, sublayers: int) -> None:
        super().__init__(dim, sublayers, schedule="one-pass")

    def folds_norm(self, state: State, i: int) -> bool:
        return i > 0

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        from fla.ops.attnres import fused_attnres

        if i == 0:
            return super()._read(state, i, norm)
        read, weight = self.reads[str(i)], getattr(norm, "weight", None)
        dtype = state[0].dtype
        weights = [
            None if w is None else w.to(dtype) for w in (read.query, read.key_weight, weight)
        ]
        out = fused_attnres(
            weights[0], list(state), *weights[1:], rms_eps=self.eps, checkpoint_level=0
        )
        return out[0] if isinstance(out, tuple) else out, state


def config_of(arm: str, size: str, folder: Path, device: str) -> Config:
    residual, _, mode = arm.partition("/")
    shape, windows = SIZES[size]
    train = TrainSettings(
        steps=10**6, batch_size=windows, device=device, deterministic=False, compile=mode or "auto"
    )
    return Config(
        model=ModelConfig.named("nano", residual=residual, vocab_size=VOCABULARY, **shape),
        data=DataSettings(source=("stdlib",), cache=str(folder / "cache")),
        train=train,
    )


def allocated(device: str) -> int:
    """Bytes that arms before hold; from here on the peak is the next one's."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


class Arm:
    """A run that is ready to step, and what its first steps cost."""

    def __init__(self, name: str, size: str, folder: Path, device: str) -> None:
        self.name, before, began = name, allocated(device), time.perf_counter()
        self.run: Run = begin(
            config_of(name, size, folder, device), folder / size / name, resume=False
        )
        ways: list[str] = []
        self.steps = steps_of(self.run, ways.append)
        first = [*self.steps.take(1), *self.steps.wait()][0]
        self.record: dict[str, Any] = {
            "first_loss": first.loss,
            "first_step_seconds": time.perf_counter() - began,
        }
        self.number = 1
        self.go(5)
        self.record |= {
            "way": ways,
            "parameters": self.run.whole.parameter_count()["total"],
            "flops_per_token": self.run.whole.flops_per_token(self.run.train.context),
            "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30
            if device == "cuda"
            else None,
        }
        self.rates: list[float] = []

    def go(self, steps: int) -> float:
        """Tokens per second of so many steps, the last one waited for."""
        began = time.perf_counter()
        for _ in range(steps):
            self.number += 1
            self.steps.take(self.number)
        self.steps.wait()
        settings = self.run.config.train
        return steps * settings.batch_size * self.run.train.context / (time.perf_counter() - began)


class FlaArm:
    """fla's KDA model: KDA in every layer, no experts; eager, with bf16 autocast and a fused AdamW."""

    def __init__(self, name: str, size: str, folder: Path, device: str) -> None:
        from fla.models import KDAConfig, KDAForCausalLM

        self.name, before, began = name, allocated(device), time.perf_counter()
        shape, windows = SIZES[size]
        config = KDAConfig(
            hidden_size=shape["dim"], num_hidden_layers=shape["layers"], num_heads=shape["heads"],
            head_dim=shape["dim"] // shape["heads"], intermediate_size=shape["mlp_dim"], vocab_size=VOCABULARY,
            max_position_embeddings=shape["context"],
        )  # fmt: skip
        self.model = KDAForCausalLM(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (windows, shape["context"]), device=device)
        loss = float(self.step())
        self.record: dict[str, Any] = {
            "first_loss": loss,
            "first_step_seconds": time.perf_counter() - began,
        }
        self.go(5)
        count = sum(p.numel() for p in self.model.parameters())
        self.record |= {"way": ["eager"], "parameters": count}
        self.record["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        self.rates: list[float] = []

    def step(self) -> Tensor:
        with torch.autocast(self.tokens.device.type, torch.bfloat16):
            loss = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def go(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return steps * self.tokens.numel() / (time.perf_counter() - began)


def compile_settings(size: str, share: int, shares: int) -> None:
    """One step of the plain and of fla's model, four layers deep, with a share of the settings of fla's kernels."""
    import fla.models  # noqa: F401 - its kernels exist from here on
    from triton.runtime.autotuner import Autotuner

    for thing in gc.get_objects():
        if issubclass(type(thing), Autotuner):
            thing.configs = thing.configs[share % len(thing.configs) :: shares]
    SIZES[size][0]["layers"] = 4  # a round of the pattern
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("standard", "fla-kda"):
            arm_of(arm, size, Path(folder), "cuda")


def side_by_side(size: str, processes: int) -> None:
    command = [sys.executable, "-m", "benchmarks.speed", "--sizes", size, "--share"]
    started = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    if failed := sum(process.wait() != 0 for process in started):
        raise SystemExit(f"{failed} of {processes} processes failed")


def arm_of(name: str, size: str, folder: Path, device: str) -> Arm | FlaArm:
    return (FlaArm if name == "fla-kda" else Arm)(name, size, folder, device)


def measure(size: str, names: list[str], folder: Path, device: str, rounds: int) -> dict[str, Any]:
    arms: list[Arm | FlaArm] = []
    failed: dict[str, dict[str, str]] = {}
    for name in names:
        if device == "cuda":
            torch.compiler.reset()  # arms before are captured by now; their code would count against this one's
        try:
            arms.append(arm_of(name, size, folder, device))
            print(
                f"{size} {name}: ready after {arms[-1].record['first_step_seconds']:.1f} s",
                file=sys.stderr,
            )
        except (
            RuntimeError,
            ImportError,
            ValueError,
        ) as error:  # a peer's own; the others are measured all the same
            failed[name] = {"failed": str(error).strip().splitlines()[0]}
    for number in range(rounds):
        for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
            arm.go(STEPS)
            arm.rates.append(arm.go(STEPS))
    plain = next(arm.record["first_loss"] for arm in arms if arm.name in PLAIN)
    results: dict[str, Any] = {}
    for arm in arms:
        if abs(arm.record["first_loss"] - plain) > GATE * plain:
            results[arm.name] = {
                **arm.record,
                "failed": "its first loss is not the plain residual's",
            }
            continue
        ordered = sorted(arm.rates)
        rate = statistics.median(ordered)
        spread = {"p20": ordered[len(ordered) // 5], "p80": ordered[-1 - len(ordered) // 5]}
        results[arm.name] = {**arm.record, "tokens_per_second": rate, **spread}
        if isinstance(arm, Arm):
            arm.run.log.close()
    best = max(results[name]["tokens_per_second"] for name in PLAIN if name in results)
    for row in results.values():
        if "tokens_per_second" in row:
            row["of_plain"] = row["tokens_per_second"] / best
    return results | failed


def cold(arm: str, size: str) -> float:
    """Seconds from the start of the run to the end of its first step, with nothing compiled before."""
    shape, windows = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            word
            for key, value in shape.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        command = [
            sys.executable,
            "-m",
            "headwater.cli",
            "train",
            "--size",
            "nano",
            *flags,
            "--residual",
            arm,
        ]
        command += [
            "--vocab-size",
            str(VOCABULARY),
            "--batch-size",
            str(windows),
            "--steps",
            "2",
            "--log-every",
            "1",
        ]
        command += [
            "--eval-every",
            "9",
            "--depth-every",
            "9",
            "--no-deterministic",
            "--out",
            f"{folder}/run",
        ]
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **caches})
        first = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[0])
        return first["seconds"]


def matrix_rate() -> float:
    """bf16 operations per second of a large matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / times(lambda: a @ b)["ms"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["50m", "342m"], choices=SIZES)
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--plugin", nargs="+", default=[], help="modules that register residuals")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cold", nargs="*", default=["standard", "attnres-block"])
    parser.add_argument("--compile", type=int, metavar="PROCESSES")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    import_plugins(flags.plugin)
    if flags.share:
        compile_settings(flags.sizes[0], *map(int, flags.share.split("/")))
    elif flags.compile:
        side_by_side(flags.sizes[0], flags.compile)
    else:
        report(flags)


def report(flags: argparse.Namespace) -> None:
    gpu = flags.device == "cuda"
    results: dict[str, Any] = provenance(
        "python -m benchmarks.speed " + " ".join(sys.argv[1:]), flags.device
    )
    results["matrix_flops"] = matrix_rate() if gpu else None
    with tempfile.TemporaryDirectory() as folder:
        for size in flags.sizes:
            results[size] = measure(
                size, flags.arms or list(DEFAULT[size]), Path(folder), flags.device, flags.rounds
            )
            for arm in results[size].values():
                if gpu and "tokens_per_second" in arm and "flops_per_token" in arm:
                    arm["utilisation"] = (
                        arm["tokens_per_second"] * arm["flops_per_token"] / results["matrix_flops"]
                    )
            if flags.out:
                flags.out.write_text(json.dumps(results, indent=1) + "\n")
            torch.cuda.empty_cache() if gpu else None
    for arm in flags.cold if gpu else ():
        results.setdefault("cold_first_step_seconds", {})[arm] = cold(arm, flags.sizes[0])
    if flags.out:
        flags.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
