"""Continuing text on one GPU: new tokens, prompts, memory, and the first token of a new process.

    python -m benchmarks.generate --out FILE                          # one H200, about 8 minutes
    python -m benchmarks.generate --parts decode context --limit 60   # some of it, in a minute

Arms take turns within a process, so that a drift of the machine meets all: decoders of size xl
(1.26 billion parameters, bf16) with the plain residual, Block and Full Attention Residuals.
`transformers` is a transformers Llama of the same shape, with a static cache as its own `generate`
compiles it; `llama` is the same model converted to Block. A step whose logits are not those of the
decoder's own forward pass shows no time. Caches hold noise: their length is what counts. `--limit`
is in seconds: what would begin after it is left out, and the file says so.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwater.generation.captured_step import CapturedSteps, GeneralStep, step_of
from headwater.generation.fused_step import FusedStep
from headwater.models import Decoder, ModelConfig
from headwater.models.cache import Cache

from .measure import copy_bandwidth, provenance

ARMS = {"plain": "standard", "block": "attnres-block", "full": "attnres-full"}
SHAPES: dict[str, dict[str, Any]] = {
    "xl": {
        "dim": 2048,
        "layers": 24,
        "heads": 16,
        "kv_heads": 8,
        "mlp_dim": 5632,
        "vocab_size": 32000,
    },
    "tiny": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_dim": 48, "vocab_size": 64},
}
# `longest` is the longest prompt of all, read in chunks; `new` are tokens of transformers'
# generate; `tokens` is the number after which memory is looked at again.
SIZES: dict[str, dict[str, Any]] = {
    "xl": {
        "batches": (1, 16, 64, 256), "context": 1024, "contexts": (1024, 8192, 32768, 131072),
        "prompts": (2048, 8192, 32768), "longest": 131072, "chunk": 8192, "new": (16, 80), "tokens": 10000,
    },
    "tiny": {
        "batches": (1, 3), "context": 8, "contexts": (8, 16), "prompts": (8, 16),
        "longest": 16, "chunk": 4, "new": (2, 4), "tokens": 24,
    },
}  # fmt: skip
PARTS = ("decode", "kernels", "prefill", "hf", "peak", "depth", "memory", "context", "cold")
HF = ("transformers", "llama")
CALLS, WARM_UP, ROUNDS = 32, 2, 7
GATE = 0.1  # two orders of summation in bf16 differ by a few hundredths after 48 sublayers


class Out(Exception):
    """The time is over."""


class Bench:
    """The size, the device and the clock, which all parts share."""

    def __init__(self, size: str, device: str, limit: float, rounds: int) -> None:
        self.size, self.device, self.rounds = size, device, rounds
        self.end = time.monotonic() + limit
        self.sizes = SIZES[size]
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise Out

    def model(self, arm: str, context: int, **settings: Any) -> Decoder:
        self.check()
        torch.manual_seed(0)
        shape = {**SHAPES[self.size], "context": context, "residual": ARMS[arm], **settings}
        with torch.device(self.device):
            model = Decoder(ModelConfig(**shape))
            for name, parameter in model.named_parameters():
                # Queries at zero would make every read a mean.
                if name.endswith("query"):
                    torch.nn.init.normal_(parameter, std=0.02)
        return model.to(self.dtype).eval()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def clock(self, function: Callable[[], Any], calls: int = 1) -> float:
        """Measure the milliseconds of a call, over several in a row."""
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        self.wait()
        return (time.perf_counter() - began) * 1e3 / calls

    def turns(self, functions: dict[str, Callable[[], Any]], calls: int) -> dict[str, Any]:
        """Time functions that take turns: medians, and medians of quotients with the first.

        Two rounds before do not count: what the first allocates, the second may divide otherwise.
        """
        rounds, order = [], list(functions)
        gc.collect()
        gc.disable()  # a collection amid a round would be one arm's
        try:
            for number in range(WARM_UP + self.rounds):
                self.check()
                times = {name: self.clock(functions[name], calls) for name in order}
                if number >= WARM_UP:
                    rounds.append(times)
                order.reverse()  # nobody is always behind the same one
        finally:
            gc.enable()
        first = next(iter(functions), "")
        medians = {}
        for name in functions:
            quotient = statistics.median(times[name] / times[first] for times in rounds)
            medians[name] = {
                "ms": statistics.median(times[name] for times in rounds),
                "lowest": min(times[name] for times in rounds),
                "over_first_percent": 100 * (quotient - 1),
            }
        return medians

    def filled(self, model: Decoder, batch: int, room: int) -> Cache:
        """A cache with noise for what it has seen, whose lengths the device alone knows."""
        cache = model.new_cache(batch, room)
        for entry in cache.entries:
            for tensor in entry.tensors() if entry else ():
                tensor.normal_()
        cache.lengths.even = None
        return cache

    def steps(self, model: Decoder, cache: Cache) -> CapturedSteps:
        device, rows = torch.device(self.device), len(cache.lengths.tokens)
        return CapturedSteps(step_of(model, cache), rows, device, graph=self.device == "cuda")


def steps_of(
    bench: Bench, model: Decoder, cache: Cache, context: int, notes: dict[str, Any]
) -> CapturedSteps | None:
    """Capture steps of a model and hold their logits, replayed too, against its forward pass.

    Where they are wrong, return None; `notes` says what was wrong.
    """
    lengths = cache.lengths.tokens
    tokens = torch.arange(len(lengths), device=bench.device) % model.config.vocab_size
    lengths.fill_(context)
    expected = GeneralStep(model, cache)(tokens).float()
    steps, distances = bench.steps(model, cache), []
    for _ in range(2):  # the second is a replay
        lengths.fill_(context)
        steps.tokens.copy_(tokens)
        error = steps.run().float() - expected
        distances.append(float(error.norm() / expected.norm()))
    notes |= {
        "off_by": distances[0],
        "way": "fused" if isinstance(steps.step, FusedStep) else "forward",
        "captured": steps.replay is not None,
    }
    if not all(distance <= GATE for distance in distances):
        first, replayed = distances
        notes["refused"] = f"logits are off by {first:.3g}, replayed {replayed:.3g}: above {GATE}"
        return None
    return steps


def timed_steps(
    bench: Bench, models: dict[str, Decoder], cache: Cache, context: int
) -> dict[str, Any]:
    """Time a step of each model at a context, over one cache that they share."""
    calls = CALLS if bench.device == "cuda" else 1
    notes: dict[str, Any] = {arm: {} for arm in models}
    steps = {
        arm: steps_of(bench, model, cache, context, notes[arm]) for arm, model in models.items()
    }

    def several(model_steps: CapturedSteps) -> None:
        cache.lengths.tokens.fill_(context)
        for _ in range(calls):
            model_steps.run()

    running = {arm: partial(several, timed) for arm, timed in steps.items() if timed is not None}
    result = bench.turns(running, 1)
    for values in result.values():
        values["ms"] /= calls
        values["lowest"] /= calls
    return {arm: {**result.get(arm, {}), **notes[arm]} for arm in models}


def decode(bench: Bench) -> Iterator[tuple[str, Any]]:
    context = bench.sizes["context"]
    models = {arm: bench.model(arm, context + 64) for arm in ARMS}
    weights = sum(p.numel() * p.element_size() for p in models["plain"].parameters())
    yield "weights_gb", (weights - models["plain"].embedding.weight.nbytes) / 1e9
    for batch in bench.sizes["batches"]:
        bench.check()
        cache = bench.filled(models["plain"], batch, context + 64)
        yield f"batch {batch}", timed_steps(bench, models, cache, context)


def kernels(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Time a step's kernels: microseconds and launches of each."""
    context = bench.sizes["context"]
    for arm in ("plain", "block"):
        model = bench.model(arm, context + 64)
        for batch in bench.sizes["batches"]:
            bench.check()
            steps = steps_of(bench, model, bench.filled(model, batch, context + 64), context, {})
            if steps is not None and bench.device == "cuda":
                yield f"{arm}, batch {batch}", by_kernel(steps.run)
    for arm in ("plain", "block"):
        length = sorted(bench.sizes["prompts"])[-2]
        run = read_prompt(bench, bench.model(arm, length), length, None)
        if bench.device == "cuda":
            run()
            yield f"{arm}, prompt {length}", by_kernel(run)


def by_kernel(function: Callable[[], Any]) -> list[tuple[float, int, str]]:
    """Find the kernels of a call that take longest: microseconds, launches, name."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    kernels = [(round(sum(us), 1), len(us), name) for name, us in times.items()]
    return sorted(kernels, reverse=True)[:16]


def context(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Time a step of one row as the text grows."""
    longest = max(bench.sizes["contexts"])
    models = {arm: bench.model(arm, longest + 64) for arm in ARMS}
    cache = bench.filled(models["plain"], 1, longest + 64)
    for length in bench.sizes["contexts"]:
        yield f"context {length}", timed_steps(bench, models, cache, length)


def depth(bench: Bench) -> Iterator[tuple[str, Any]]:
    context, layers = bench.sizes["context"], SHAPES[bench.size]["layers"]
    for count in (layers // 2, layers, 2 * layers):
        models = {arm: bench.model(arm, context + 64, layers=count) for arm in ARMS}
        cache = bench.filled(models["plain"], 1, context + 64)
        yield f"layers {count}", timed_steps(bench, models, cache, context)


def read_prompt(bench: Bench, model: Decoder, length: int, chunk: int | None) -> Callable[[], Any]:
    tokens = torch.randint(0, model.config.vocab_size, (1, length), device=bench.device)

    def run() -> None:
        cache = model.new_cache(1, length)
        with torch.no_grad():
            for part in tokens.split(chunk or length, 1):
                hidden = model.hidden(part, cache, last=True)
            model.head(hidden[:, -1])
        bench.wait()  # a prompt finds the GPU idle, as its reader does

    return run


def prefill(bench: Bench) -> Iterator[tuple[str, Any]]:
    prompts = bench.sizes["prompts"]
    models = {arm: bench.model(arm, max(prompts)) for arm in ARMS}
    for length in prompts:
        functions = {arm: read_prompt(bench, model, length, None) for arm, model in models.items()}
        # Up to a third of a second each: the GPU is at its power limit, and its clock wanders.
        calls = max(1, min(6, 32768 // length)) if bench.device == "cuda" else 1
        yield f"prompt {length}", bench.turns(functions, calls)


def peak(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Measure GiB above the weights while the longest prompt is read in chunks.

    `bank_gib` is for the sources of one chunk.
    """
    length, chunk = bench.sizes["longest"], bench.sizes["chunk"]
    for arm, size in (("plain", chunk), ("block", chunk), ("plain", None)):
        model = bench.model(arm, length)
        function, result = read_prompt(bench, model, length, size), {}
        sources = model.residual.num_sources(2 * model.config.layers) if arm == "block" else 0
        result["bank_gib"] = (
            sources * chunk * model.config.dim * model.embedding.weight.element_size() / 2**30
        )
        if bench.device == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        result["seconds"] = bench.clock(function) / 1e3
        if bench.device == "cuda":
            result["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        portions = "whole" if size is None else f"chunks of {size}"
        yield f"{arm}, {portions}", result
        del model, function


def memory(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Measure memory after the first tokens and after many; on a CPU the peak of the process."""
    tokens = bench.sizes["tokens"]
    for arm in ("block", "plain"):
        model = bench.model(arm, tokens + 64)
        steps = bench.steps(model, bench.filled(model, 1, tokens + 64))
        result = {}
        for number in range(tokens):
            steps.run()
            if number in (tokens // 10, tokens - 1):
                bench.wait()
                if bench.device == "cuda":
                    used = torch.cuda.memory_allocated()
                else:
                    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                result[f"bytes_after_{number + 1}"] = used
        yield arm, result


COLD = """
import sys, time
began = time.perf_counter()
import torch
from benchmarks.generate import Bench
from headwater.generation.generate import generate
bench = Bench(sys.argv[1], sys.argv[2], 1e9, 1)
model = bench.model(sys.argv[3], bench.sizes["context"])
bench.wait()
loaded = time.perf_counter()
generate(model, [[1, 2, 3]], 1, temperature=0.0)
first = time.perf_counter()
generate(model, [[1, 2, 3]], 4, temperature=0.0)
print(loaded - began, first - began, time.perf_counter() - began)
"""


def cold(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Time a new process without any kernel compiled before, in seconds.

    Until the model is there, the first token, and four more tokens (with the step captured).
    """
    for arm in ("plain", "block"):
        bench.check()
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TRITON_CACHE_DIR": f"{folder}/triton",
            }
            command = [sys.executable, "-c", COLD, bench.size, bench.device, arm]
            process = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, **caches}
            )
            yield (
                arm,
                dict(zip(("model", "first_token", "captured"), map(float, process.stdout.split()))),
            )


def hf(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Models of transformers."""
    from . import converted

    for batch, arm in itertools.product(bench.sizes["batches"][:2], bench.sizes.get("hf", HF)):
        bench.check()
        prompt = torch.ones(batch, bench.sizes["context"], dtype=torch.long, device=bench.device)
        model = converted.model_of(arm, SHAPES[bench.size], bench.dtype, bench.device)
        yield (
            f"{arm}, batch {batch}",
            converted.measured(model, prompt, bench.sizes["new"], bench.clock),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--size", default="xl", choices=SIZES)
    parser.add_argument("--batches", nargs="+", type=int, help="of decoding")
    parser.add_argument("--prompts", nargs="+", type=int, help="lengths to read")
    parser.add_argument("--tokens", type=int, help="after which memory is looked at again")
    parser.add_argument("--hf", nargs="+", choices=HF, help="arms of transformers' generate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds in all")
    parser.add_argument("--part-limit", type=float, default=1e9, help="seconds of a part")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    command = "python -m benchmarks.generate " + " ".join(sys.argv[1:])
    results: dict[str, Any] = provenance(command, flags.device)
    results["copy_tb_per_second"] = copy_bandwidth() if flags.device == "cuda" else None
    lists = {name: getattr(flags, name) for name in ("batches", "prompts", "tokens", "hf")}
    end = time.monotonic() + flags.limit
    for part in flags.parts:
        bench = Bench(
            flags.size, flags.device, min(flags.part_limit, end - time.monotonic()), flags.rounds
        )
        bench.sizes = bench.sizes | {name: value for name, value in lists.items() if value}
        results[part] = {}
        try:
            with torch.no_grad():
                for name, value in globals()[part](bench):
                    results[part][name] = value
                    print(part, name, json.dumps(value), flush=True)
                    write(flags.out, results)
        except Out:
            results[part]["left_out"] = "the rest: the time was over"
        if flags.device == "cuda":
            torch.cuda.empty_cache()
        write(flags.out, results)
    print(json.dumps(results))


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
