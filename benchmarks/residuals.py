"""Step time and peak memory of a decoder with each residual, relative to the plain one.

    python -m benchmarks.residuals --out FILE                             # on the GPU where there is one, else the CPU
    python -m benchmarks.residuals --residuals standard mhc ddl --repeats 2
    python -m benchmarks.residuals --duality --no-rule --parallel 1      # local mixing along the sequence or the depth

12 layers, width 512; forward and backward, on a GPU replayed as a CUDA graph. Arms: `eager`, our decoder as it is;
`compiled`, our decoder under torch.compile; `formula`, the residual's plain formula (tests/formulas.py)
in the same decoder under torch.compile. The better of the first two may take 1.5 times the last one. Every residual has
its formula compiled apart from its class, so the comparison can fail for each of them; for `standard` it shows the
noise.

`--parallel` processes prepare at once (a core each), and one at a time measures. A GPU runs all arms at 12 layers
unless --rule-layers says otherwise. A CPU compares at 2: compiling twelve takes minutes for each residual there. Rows
are printed and stored as they come, with what they say so far. The last line is JSON.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS = 12
BATCHES = {"cuda": (16, 1024), "cpu": (2, 128)}  # windows, context
REPEATS = {"cuda": 10, "cpu": 3}
RULE_LAYERS = {"cuda": LAYERS, "cpu": 2}
LIMIT = 1.5
GATE = 0.01  # relative difference allowed between the losses of a residual's arms
# Local mixing along either axis, and a better shortcut instead (arXiv 2603.16039): docs/explanation/duality.md.
DUALITY = (
    "standard",
    "standard+shortswa=4",
    "depth-window:window=4",
    "depth-window:window=4,maps=reader",
    "depth-window:window=4,maps=shared",
    "ddl",
)
# 40 divisions a sublayer, each a kernel forward and more backward: compared at 2 layers everywhere
UNROLLED = ("mhc",)

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    residual: str
    arms: tuple[str, ...]
    layers: int

    def start(self, flags: argparse.Namespace, errors: Path) -> subprocess.Popen[str]:
        batch, context = BATCHES[flags.device]
        numbers = {
            "layers": self.layers,
            "batch": batch,
            "context": context,
            "repeats": flags.repeats,
        }
        command = [sys.executable, "-m", "benchmarks.residual_step", "--residual", self.residual]
        command += ["--arms", *self.arms, "--device", flags.device]
        command += [str(part) for name, value in numbers.items() for part in (f"--{name}", value)]
        # Processes that compile side by side have one core each; where the CPU is measured, it is measured whole.
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if flags.parallel > 1 else {}
        environment |= {"OMP_NUM_THREADS": "1"} if flags.device == "cuda" else {}
        with errors.open("w") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **environment},
            )


def jobs_of(
    residuals: list[str], rule_layers: int, rule: bool = True, table: bool = True
) -> list[Job]:
    """All residuals, then what they are compared with: like takes as long as like, which keeps waves short."""
    jobs, rivals = [], []
    for spec in residuals:
        depth = rule_depth(spec, rule_layers)
        compiled = ("compiled",) if rule and rule_layers == LAYERS else ()
        if table:
            jobs.append(Job(spec, ("eager", *compiled), LAYERS))
        if rule:
            # The table has them at 12 layers
            arms = () if table and depth == LAYERS else ("eager", "compiled")
            rivals.append(Job(spec, (*arms, "formula"), depth))
    return jobs + rivals


def rule_depth(spec: str, rule_layers: int) -> int:
    return (
        min(rule_layers, RULE_LAYERS["cpu"]) if spec.partition(":")[0] in UNROLLED else rule_layers
    )


def run(jobs: list[Job], flags: argparse.Namespace) -> Iterator[Row]:
    """Waves of `parallel` jobs: all prepare, then each measures while the others wait."""
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(jobs), flags.parallel):
            wave = jobs[first : first + flags.parallel]
            logs = [Path(folder) / f"{first + n}.txt" for n in range(len(wave))]
            processes = [job.start(flags, log) for job, log in zip(wave, logs, strict=True)]
            deadline = time.monotonic() + flags.limit
            ready = [await_line(process, deadline) == "ready" for process in processes]
            for process, prepared in zip(processes, ready, strict=True):
                if not prepared:
                    end(process, deadline)  # so that nobody compiles while others measure
            for job, process, log, prepared in zip(wave, processes, logs, ready, strict=True):
                yield from rows_of(job, process, log, prepared, flags)


def rows_of(
    job: Job, process: subprocess.Popen[str], log: Path, ready: bool, flags: argparse.Namespace
) -> Iterator[Row]:
    remaining = list(job.arms)
    deadline = time.monotonic() + flags.limit
    if ready:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        while remaining and (line := await_line(process, deadline)):
            yield json.loads(line)
            remaining.pop(0)
    end(process, deadline)
    process.communicate()
    log_lines = log.read_text().strip().splitlines()
    killed = process.returncode == -signal.SIGKILL
    reason = (
        f"killed: no result within {flags.limit:.0f} s"
        if killed
        else (log_lines[-1] if log_lines else "it left no message")
    )
    for arm in remaining:
        yield {"residual": job.residual, "arm": arm, "layers": job.layers, "error": reason}


def await_line(process: subprocess.Popen[str], deadline: float) -> str:
    """The next line of its output, or nothing if it ends or the deadline passes first. Workers flush whole lines."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    return process.stdout.readline().strip() if readable else ""


def end(process: subprocess.Popen[str], deadline: float) -> None:
    """Wait for one that has said its last, and kill one that let the deadline pass."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()


def find(rows: list[Row], residual: str, arm: str, layers: int) -> Row | None:
    key = (residual, arm, layers)
    return next(
        (r for r in rows if (r["residual"], r["arm"], r["layers"]) == key and "ms" in r), None
    )


def ratios(rows: list[Row], residual: str, rule_layers: int) -> Row:
    """Against the plain residual at 12 layers, and against the straightforward compile. A red gate gives no number."""
    result: Row = {"residual": residual}
    for arm in ("eager", "compiled"):
        row, plain = (find(rows, name, arm, LAYERS) for name in (residual, rows[0]["residual"]))
        if row and plain:
            result[f"{arm}_time"] = row["ms"] / plain["ms"]
            result[f"{arm}_memory"] = row["peak_mib"] / plain["peak_mib"]
    depth = rule_depth(residual, rule_layers)
    straight = find(rows, residual, "formula", depth)
    if straight is None:
        return result
    result["straightforward_layers"] = depth
    for arm in ("eager", "compiled"):
        row = find(rows, residual, arm, depth)
        if row is None:
            continue
        if abs(row["loss"] - straight["loss"]) > GATE * straight["loss"]:
            return {
                **result,
                "error": f"losses differ: {arm} {row['loss']:.4f}, formula {straight['loss']:.4f}",
            }
        result[f"{arm}_over_straightforward"] = row["ms"] / straight["ms"]
    over = [value for key, value in result.items() if key.endswith("_over_straightforward")]
    return {**result, "within_limit": min(over) <= LIMIT} if over else result


def describe(row: Row) -> str:
    name = f"{row['residual']:34} {row['arm']:9} {row['layers']:2} layers"
    if "error" in row:
        return f"{name}  {row['error']}"
    return f"{name} {row['ms']:9.1f} ms {row['peak_mib']:9.0f} MiB   first step {row['first_step_s']:6.1f} s"


def table(summary: list[Row]) -> str:
    heads = ("eager_time", "eager_memory", "compiled_time", "compiled_memory")
    rule = ("eager_over_straightforward", "compiled_over_straightforward")
    lines = [
        "to the first residual: eager time, memory; compiled time, memory | to the straightforward compile: both"
    ]
    for row in summary:
        cells = [f"{row[k]:6.2f}" if k in row else "     -" for k in (*heads, *rule)]
        cells[len(heads) :] = [
            cell + ("!" if row.get(k, 0) > LIMIT else " ")
            for cell, k in zip(cells[len(heads) :], rule, strict=True)
        ]
        verdict = (
            row.get("error")
            or {True: "within 1.5", False: "BEYOND 1.5", None: ""}[row.get("within_limit")]
        )
        lines.append(
            f"{row['residual']:34} {' '.join(cells[:4])} | {' '.join(cells[4:])} {verdict}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.residuals")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--residuals",
        "--arms",
        nargs="+",
        help="the plain one first; every registered one by default",
    )
    which.add_argument(
        "--duality", action="store_true", help=f"instead of --residuals: {', '.join(DUALITY)}"
    )
    parser.add_argument(
        "--device", choices=BATCHES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--parallel", type=int, help="processes that prepare at once; one a core by default"
    )
    parser.add_argument("--repeats", type=int, help="steps measured")
    parser.add_argument(
        "--rule-layers", type=int, help="depth at which arms are compared with compilation"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--no-rule", action="store_true", help="the eager arm alone: nothing is compiled"
    )
    only.add_argument(
        "--rule-only", action="store_true", help="the comparison with compilation alone"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds a process may take to prepare, or to measure",
    )
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    flags.parallel = flags.parallel or os.cpu_count() or 1
    flags.repeats = flags.repeats or REPEATS[flags.device]
    flags.rule_layers = flags.rule_layers or RULE_LAYERS[flags.device]
    return flags


def main() -> None:
    from headwater.residuals import names

    from .measure import provenance
    from .residual_step import SHAPE

    flags = parse()
    residuals = list(DUALITY if flags.duality else flags.residuals or names())
    command = "python -m benchmarks.residuals " + " ".join(sys.argv[1:])
    result = {
        **provenance(command, flags.device),
        "shape": {**SHAPE, "layers": LAYERS},
        "batch": BATCHES[flags.device],
    }
    rows: list[Row] = []
    for row in run(
        jobs_of(residuals, flags.rule_layers, not flags.no_rule, not flags.rule_only), flags
    ):
        rows.append(row)
        print(describe(row), flush=True)
        summary = [ratios(rows, residual, flags.rule_layers) for residual in residuals]
        result |= {
            "rule_layers": flags.rule_layers,
            "limit": LIMIT,
            "rows": rows,
            "summary": summary,
        }
        if flags.out:
            flags.out.parent.mkdir(parents=True, exist_ok=True)
            flags.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(summary))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
