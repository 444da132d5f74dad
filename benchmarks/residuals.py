"""Step time and peak memory of a decoder with each residual, relative to the plain one.

    python -m benchmarks.residuals                       # 12 layers, width 512, on the GPU where there is one, else CPU
    python -m benchmarks.residuals --residuals mhc ddl --compile

Each residual runs in a process of its own, so that its peak memory is its own; `--compile` adds the same decoder under
torch.compile, which is what a straightforward compilation of the residual's formula gives. The last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPE = {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 8, "mlp_dim": 1408, "vocab_size": 512}
BATCHES = {"cuda": (16, 1024), "cpu": (2, 128)}  # windows, context
REPEATS = {"cuda": 10, "cpu": 5}


def main() -> None:
    flags = parse()
    if flags.one:
        print(json.dumps(measure(flags.one, flags.device, flags.compile)))
        return
    from headwater.residuals import names

    from .measure import provenance

    rows = []
    for spec in flags.residuals or names():
        for compiled in (False, True) if flags.compile else (False,):
            rows.append(run(spec, flags.device, compiled, flags.limit))
            print(describe(rows[-1], rows[0]), flush=True)
    command = "python -m benchmarks.residuals " + " ".join(sys.argv[1:])
    result = {**provenance(command, flags.device), "shape": SHAPE, "batch": BATCHES[flags.device], "rows": rows}
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.residuals")
    parser.add_argument("--residuals", nargs="+", help="the plain one first; every registered one by default")
    parser.add_argument("--device", choices=BATCHES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds one residual may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(spec: str, device: str, compiled: bool, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.residuals", "--one", spec, "--device", device]
    command += ["--compile"] if compiled else []
    row: dict[str, Any] = {"residual": spec, "compiled": compiled}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"no result within {limit:.0f} s"}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def measure(spec: str, device: str, compiled: bool) -> dict[str, Any]:
    """Medians over steps: forward, backward and the gradients' reset, bf16 autocast on a GPU, fp32 on a CPU."""
    import torch
    import torch.nn.functional as F

    from headwater.models import Decoder, ModelConfig

    torch.manual_seed(0)
    batch, context = BATCHES[device]
    model = Decoder(ModelConfig(**SHAPE, context=context, residual=spec)).to(device)
    tokens = torch.randint(0, SHAPE["vocab_size"], (batch, context + 1)).to(device)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = forward(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(REPEATS[device]):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident
    return {"ms": 1e3 * sorted(seconds)[len(seconds) // 2], "peak_mib": peak / 2**20, "first_step_s": first}


def describe(row: dict[str, Any], base: dict[str, Any]) -> str:
    name = row["residual"] + (" compiled" if row["compiled"] else "")
    if "error" in row or "error" in base:
        return f"{name:32} {row.get('error', 'the baseline failed')}"
    time_ratio, memory_ratio = row["ms"] / base["ms"], row["peak_mib"] / base["peak_mib"]
    return f"{name:32} {row['ms']:9.1f} ms  x {time_ratio:5.2f}   {row['peak_mib']:9.0f} MiB  x {memory_ratio:5.2f}"


if __name__ == "__main__":
    main()
