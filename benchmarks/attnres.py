"""Attention Residuals on one GPU: `python -m benchmarks.attnres [gate] [read] [stack] [full] [decoder] [--out FILE]`.

The correctness gate runs first; if it fails, nothing else runs. "Extra" is time over the compiled plain residual, in
passes over one (tokens x D) tensor per sublayer. The last line on stdout is JSON, the same as in --out.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from headwater.ops import depth_attention

from .arms import EPS, ReadEverySublayer, Stack, arm, fill, reference_read
from .decoder import decoder
from .measure import cold_start, copy_bandwidth, graph_times, peak_gib, provenance, times

STACK = {"tokens": 16384, "dim": 2048, "sublayers": 48, "spec": "attnres-block:block=6"}
FULL = {"tokens": 16384, "dim": 2048, "sublayers": 48, "spec": "attnres-full"}
STACK_ARMS = ["plain-compiled", "headwater", "headwater-compiled", "fla-0", "fla-1", "liger", "pytorch-compiled"]
READS = [(9, 8192, 7168), (5, 1024, 7168), (9, 16384, 2048), (9, 64, 7168)]


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def gate() -> list[dict[str, Any]]:
    """Output and every gradient of a stack against fp64: at most twice the error of plain PyTorch in the same dtype."""
    rows = []
    for spec, dim, tokens in [("attnres-block:block=3", 1000, 15), ("attnres-full", 256, 64)]:
        for dtype in (torch.float32, torch.bfloat16):
            results: dict[str, list[torch.Tensor]] = {}
            draw = torch.Generator(device="cuda").manual_seed(1)
            x, seed = (torch.randn(tokens, dim, device="cuda", generator=draw).to(dtype) for _ in range(2))
            for name, wide in (("truth", torch.float64), ("pytorch", dtype), ("headwater", dtype)):
                kind = Stack(spec, dim, 8) if name == "headwater" else ReadEverySublayer(spec, dim, 8, reference_read)
                fill(kind)
                stack = kind.cuda().to(dtype).to(wide)
                leaf = x.to(wide).requires_grad_()
                out = stack(leaf)
                out.backward(seed.to(wide))
                assert leaf.grad is not None
                results[name] = [out.detach(), leaf.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]
            pairs = list(zip(results["pytorch"], results["headwater"], results["truth"], strict=True))
            worst = max(error(ours, truth) / (2 * error(plain, truth) + 1e-5) for plain, ours, truth in pairs)
            rows.append({"spec": spec, "dim": dim, "tokens": tokens, "dtype": str(dtype), "worst": round(worst, 3)})
            if not worst <= 1:
                raise SystemExit(f"gate: error beyond twice plain PyTorch's: {rows[-1]}")
    return rows


def read(bandwidth: float) -> list[dict[str, Any]]:
    """One read of N sources, forward only, no norm: bytes moved over the copy bandwidth."""
    rows = []
    for count, tokens, dim in READS:
        sources = [torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        query = torch.randn(dim, device="cuda") * 0.02
        key_weight = torch.ones(dim, device="cuda")
        ideal = (count + 1) * tokens * dim * 2 / bandwidth / 1e9
        row: dict[str, Any] = {"sources": count, "tokens": tokens, "dim": dim, "ideal_ms": ideal}

        def ours(sources: Any = sources, query: Any = query, key_weight: Any = key_weight) -> None:
            depth_attention(sources, query, key_weight, backend="triton")

        with torch.no_grad():
            row["headwater"] = graph_times(ours)
            row["of_copy_bandwidth"] = ideal / row["headwater"]["ms"]
            try:
                from fla.ops.attnres import fused_attnres

                shaped = [source.unsqueeze(0) for source in sources]
                low, key = query.bfloat16(), key_weight.bfloat16()
                row["fla"] = times(lambda: fused_attnres(low, shaped, key, rms_eps=EPS))  # noqa: B023
            except ImportError as missing:
                row["fla"] = {"skipped": str(missing)}
        rows.append(row)
    return rows


def run_arm(name: str, case: dict[str, Any]) -> dict[str, Any]:
    tokens, dim = case["tokens"], case["dim"]
    module = arm(name, case["spec"], dim, case["sublayers"])
    draw = torch.Generator(device="cuda").manual_seed(2)
    x, seed = (torch.randn(tokens, dim, device="cuda", generator=draw).bfloat16() for _ in range(2))
    x.requires_grad_()

    def both() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(seed)

    row: dict[str, Any] = {"arm": name, "cold_s": cold_start(both)}
    row["both"], row["forward"] = times(both, calls=4), times(lambda: module(x), calls=4)
    row["peak_gib"] = peak_gib(both)
    if name in ("plain-compiled", "headwater"):
        row["both_graph"] = graph_times(both)
    return row


def stack(names: list[str], case: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    pass_ms = case["tokens"] * case["dim"] * 2 / bandwidth / 1e9
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            row = run_arm(name, case)
        except (ImportError, torch.OutOfMemoryError) as reason:
            row = {"arm": name, "skipped": f"{type(reason).__name__}: {reason}"[:200]}
        rows.append(row)
        if "both" in row and "both" in rows[0]:
            for part in ("forward", "both", *(["both_graph"] if "both_graph" in row else [])):
                row[f"extra_{part}"] = (row[part]["ms"] - rows[0][part]["ms"]) / pass_ms / case["sublayers"]
        print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return {**case, "pass_us": pass_ms * 1e3, "arms": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["read", "stack", "full", "decoder"])
    parser.add_argument("--arms", default=",".join(STACK_ARMS))
    parser.add_argument("--widths", default="2048,4096", help="of the decoder step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    result: dict[str, Any] = provenance("python -m benchmarks.attnres " + " ".join(sys.argv[1:]))
    result["gate"] = gate()
    bandwidth = result["copy_tb_s"] = copy_bandwidth()
    print(json.dumps({"gate": result["gate"], "copy_tb_s": bandwidth}), flush=True)
    names = options.arms.split(",")
    for part in options.parts:
        if part == "read":
            result[part] = read(bandwidth)
            print(json.dumps(result[part]), flush=True)
        elif part == "stack":
            result[part] = stack(names, STACK, bandwidth)
        elif part == "full":
            result[part] = stack(
                [n for n in names if n in ("plain-compiled", "headwater", "fla-0", "fla-1")], FULL, bandwidth
            )
        elif part == "decoder":
            result[part] = [decoder(int(width)) for width in options.widths.split(",")]
        elif part != "gate":
            raise SystemExit(f"unknown part '{part}': gate, read, stack, full, decoder")
        if options.out is not None:
            result["seconds"] = time.perf_counter() - started
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
