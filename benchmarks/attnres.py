"""Attention Residuals on one GPU: `python -m benchmarks.attnres [read] [stack] [full] [decoder] [--out FILE]`.

Two parts more are run when asked for: `untuned`, a stack of a shape that nothing was tuned for, and `host`, one so
small that all the time is the host's.

The correctness gate runs first; if it fails, nothing else runs. Every arm is a process of its own with a time limit
and takes turns with the compiled plain residual. "Extra" is the time over it, in passes over one (tokens x D) tensor
per sublayer. With --warm, untimed processes side by side first fill the caches of compiled code, so that a peer's
compilation does not eat its limit; its first step is then not a cold one. The last line is JSON, as in --out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwater.residuals import with_options

from .arms import ReadEverySublayer, Stack, arm, fill, reader, reference_read
from .decoder import decoder
from .measure import captured, cold_start, copy_bandwidth, paired, peak_gib, provenance, times

STACK = {"tokens": 16384, "dim": 2048, "sublayers": 48, "spec": "attnres-block:block=6"}
CASES: dict[str, dict[str, Any]] = {
    "stack": STACK,
    "full": {**STACK, "spec": "attnres-full"},
    "untuned": {"tokens": 16384, "dim": 1536, "sublayers": 36, "spec": "attnres-block:block=5"},
    "host": {**STACK, "tokens": 256, "dim": 256},
}
OURS = ["headwater", "headwater-compiled"]
PEERS = [
    "fla-0",
    "fla-1",
    "fla-gluon",
    "liger",
    "fast-attnres",
    "flash-attn-res",
    "pytorch-compiled",
]
ARMS = {
    "read": ["headwater", *PEERS],
    "stack": ["plain-compiled", *OURS, *PEERS],
    "full": ["plain-compiled", "headwater", "fla-0", "fla-1"],
    "untuned": ["headwater", "fla-0"],
    "host": ["plain", "headwater"],
}
DRAWS = 8  # of inputs, whose errors the gate takes together
READS = [(9, 8192, 7168), (5, 1024, 7168), (9, 16384, 2048), (9, 64, 7168)]


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def worst_of(
    spec: str, dim: int, tokens: int, dtype: torch.dtype, device: str = "cuda", draws: int = DRAWS
) -> float:
    """Output and every gradient of eight sublayers against fp64, over twice plain PyTorch's error in the same dtype.

    Errors are root mean squares over several draws: that of a query's gradient in half precision is a few tokens'
    roundings, ours and PyTorch's, and the ratio of one such to the other is anything between 0.5 and 1.04."""
    stacks = []
    for kernels, wide in ((False, torch.float64), (False, dtype), (True, dtype)):
        stack = Stack(spec, dim, 8)
        if not kernels and stack.residual.phased:
            stack = ReadEverySublayer(spec, dim, 8, reference_read)
        elif not kernels:  # options that the reader has not
            stack = Stack(with_options(spec, backend="reference"), dim, 8)
        fill(stack)
        stacks.append(stack.to(device).to(dtype).to(wide))
    squares: list[tuple[list[float], list[float]]] = []  # by draw, of PyTorch and of ours
    for seed in range(draws):
        truth, plain, fused = (
            output_and_gradients(stack, tokens, dim, dtype, seed) for stack in stacks
        )
        squares.append(
            tuple(
                [error(v, t) ** 2 for v, t in zip(way, truth, strict=True)]
                for way in (plain, fused)
            )
        )
    means = [
        [statistics.fmean(same) ** 0.5 for same in zip(*way, strict=True)]
        for way in zip(*squares, strict=True)
    ]
    return max(fused / (2 * plain + 1e-5) for plain, fused in zip(*means, strict=True))


def output_and_gradients(
    stack: Stack, tokens: int, dim: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Return the output, the gradient of the input, and those of all parameters.

    Inputs are drawn in `dtype`, and computed with in the stack's own."""
    parameter = next(stack.parameters())
    draw = torch.Generator(parameter.device).manual_seed(seed)
    x, upstream = (
        torch.randn(tokens, dim, device=parameter.device, generator=draw).to(dtype)
        for _ in range(2)
    )
    leaf = x.to(parameter.dtype, copy=True).requires_grad_()  # one each, or their gradients add up
    stack.zero_grad(set_to_none=True)
    out = stack(leaf)
    out.backward(upstream.to(parameter.dtype))
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]


def gate() -> list[dict[str, Any]]:
    rows = []
    for spec, dim, tokens in [("attnres-block:block=3", 1000, 15), ("attnres-full", 256, 64)]:
        for dtype in (torch.float32, torch.bfloat16):
            worst = worst_of(spec, dim, tokens, dtype)
            rows.append(
                {
                    "spec": spec,
                    "dim": dim,
                    "tokens": tokens,
                    "dtype": str(dtype),
                    "worst": round(worst, 3),
                }
            )
            if not worst <= 1:
                raise SystemExit(f"gate: error beyond twice plain PyTorch's: {rows[-1]}")
    return rows


def read(name: str) -> dict[str, Any]:
    """One read of N sources, no norm. By CUDA graph: bytes moved over the copy bandwidth. Then as training calls it."""
    bandwidth, rows = copy_bandwidth(), []
    for count, tokens, dim in READS:
        torch._dynamo.reset()  # which after some recompilations of one function would run it as it is
        leaves = [
            torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
            for _ in range(count)
        ]
        query, key_weight = (
            torch.randn(dim, device="cuda").bfloat16() * 0.02,
            torch.ones(dim, device="cuda").bfloat16(),
        )
        inputs = (leaves, query, key_weight)
        forward = partial(reader(name), *inputs, norm_weight=None)
        both = partial(gradients, forward, leaves, torch.randn_like(leaves[0]))
        row: dict[str, Any] = {"sources": count, "tokens": tokens, "dim": dim}
        with torch.no_grad():
            row["error"] = error(forward(), reference_read(*inputs, norm_weight=None).double())
            row["forward"] = times(captured(forward))
        row["training_forward"], row["both"] = times(forward), times(both)
        row["backward_ms"] = row["both"]["ms"] - row["training_forward"]["ms"]
        row["of_copy_bandwidth"] = (
            (count + 1) * tokens * dim * 2 / bandwidth / 1e9 / row["forward"]["ms"]
        )
        rows.append(row)
    return {"arm": name, "copy_tb_s": bandwidth, "rows": rows}


def gradients(
    forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], seed: torch.Tensor
) -> Any:
    return torch.autograd.grad(forward(), leaves, seed)


def run_arm(name: str, case: dict[str, Any], *, warm: bool) -> dict[str, Any]:
    """First step, peak memory, then forward and forward + backward in turns with the compiled plain residual."""
    tokens, dim, sublayers = case["tokens"], case["dim"], case["sublayers"]
    draw = torch.Generator(device="cuda").manual_seed(2)
    x, seed = (torch.randn(tokens, dim, device="cuda", generator=draw).bfloat16() for _ in range(2))
    x.requires_grad_()

    def steps(module: torch.nn.Module) -> dict[str, Any]:
        def both() -> None:
            module.zero_grad(set_to_none=True)
            x.grad = None
            module(x).backward(seed)

        return {"forward": lambda: module(x), "both": both}

    functions = steps(arm(name, case["spec"], dim, sublayers))
    row: dict[str, Any] = {"arm": name, "first_step_s": cold_start(functions["both"])}
    if warm:
        return row
    row["peak_gib"] = peak_gib(functions["both"])
    plain = (
        functions
        if name == "plain-compiled"
        else steps(arm("plain-compiled", case["spec"], dim, sublayers))
    )
    kinds = {"": lambda step: step} | (
        {"_graph": captured} if name in ("plain-compiled", "headwater") else {}
    )
    for suffix, prepare in kinds.items():
        for part in ("forward", "both"):
            pair = paired(prepare(plain[part]), prepare(functions[part]), repeats=9)
            row[part + suffix] = pair | {
                "extra": pair["difference_ms"] / case["pass_ms"] / sublayers
            }
        row["backward_ms" + suffix] = row["both" + suffix]["ms"] - row["forward" + suffix]["ms"]
    return row


def one(part: str, name: str, case: dict[str, Any], *, warm: bool) -> Any:
    if part == "gate":
        return gate()
    if part == "read":
        return read(name)
    if part == "decoder":
        return decoder(int(name))
    return run_arm(name, case, warm=warm)


def start(
    part: str, name: str, case: dict[str, Any], *, warm: bool = False
) -> subprocess.Popen[str]:
    """A process for one arm; its result is the last line that it prints. Ours starts without any compiled kernel."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.attnres",
        "--one",
        json.dumps([part, name, case, warm]),
    ]
    environment = dict(os.environ)
    if name == "fla-gluon":
        environment["FLA_ATTNRES_GLUON"] = "1"
    if name in OURS:
        environment["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="headwater-cold-")
    if warm:
        environment["FLA_CACHE_RESULTS"] = (
            "0"  # what is tuned side by side is tuned wrongly: keep the code alone
        )
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result_of(process: subprocess.Popen[str], limit: float) -> Any:
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"skipped": f"no result within {limit:.0f} s"}
    if process.returncode:
        return {"skipped": (err.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["read", "stack", "full", "decoder"])
    parser.add_argument("--arms", help="comma-separated; all by default")
    parser.add_argument("--widths", default="1024,2048,4096", help="of the decoder step")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one arm")
    parser.add_argument(
        "--warm", type=float, default=0.0, help="seconds to fill the caches of compiled code first"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, name, case, warm = json.loads(options.one)
        print(json.dumps(one(part, name, case, warm=warm)))
        return
    if unknown := set(options.parts) - {"gate", "read", "decoder", *CASES}:
        raise SystemExit(
            f"unknown part {', '.join(sorted(unknown))}: gate, read, decoder, {', '.join(CASES)}"
        )
    run(options)


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    result: dict[str, Any] = provenance("python -m benchmarks.attnres " + " ".join(sys.argv[1:]))

    def keep(part: str, value: Any) -> None:
        result[part] = value
        result["seconds"] = time.perf_counter() - began
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    keep("gate", result_of(start("gate", "", {}), options.limit))
    if not isinstance(result["gate"], list):
        raise SystemExit(f"gate: {result['gate']['skipped']}")
    result["copy_tb_s"] = copy_bandwidth()
    torch.cuda.empty_cache()
    print(json.dumps({"gate": result["gate"], "copy_tb_s": result["copy_tb_s"]}), flush=True)
    arms = {
        part: [a for a in names if not options.arms or a in options.arms.split(",")]
        for part, names in ARMS.items()
    }
    if options.warm:
        extra_parts = [
            (part, name)
            for part in CASES
            if part in options.parts
            for name in arms[part]
            if name not in OURS
        ]
        peers = [start(part, name, CASES[part], warm=True) for part, name in extra_parts]
        deadline = time.perf_counter() + options.warm
        keep(
            "warmed", [result_of(peer, max(1.0, deadline - time.perf_counter())) for peer in peers]
        )
    for part in options.parts:
        case = CASES.get(part, {})
        if case:
            case = case | {"pass_ms": case["tokens"] * case["dim"] * 2 / result["copy_tb_s"] / 1e9}
        rows: list[Any] = []
        for name in options.widths.split(",") if part == "decoder" else arms.get(part, []):
            rows.append({"arm": name} | result_of(start(part, name, case), options.limit))
            keep(part, case | {"arms": rows})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
