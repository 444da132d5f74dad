"""Timing on one GPU: medians of events, replays of a captured graph, copy bandwidth, and where a number came from."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection
from typing import Any

import torch


def times(
    function: Callable[[], Any], repeats: int = 15, warmup: int = 3, calls: int = 1
) -> dict[str, float]:
    """Median, p20 and p80 of `function` in milliseconds. Several `calls` between two events, as in training, where the
    host runs ahead: a step's launches are queued while the one before still computes."""
    for _ in range(warmup):
        function()
    measured = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end) / calls)
    measured.sort()
    return {
        "ms": measured[len(measured) // 2],
        "p20": measured[len(measured) // 5],
        "p80": measured[-len(measured) // 5],
    }


def paired(
    base: Callable[[], Any], other: Callable[[], Any], repeats: int = 15, calls: int = 4
) -> dict[str, float]:
    """`other` beside `base`, taking turns, so that a drift of the machine meets both: medians in milliseconds, and the
    median of the differences of neighbours."""
    for function in (base, other):
        times(function, repeats=1, warmup=1, calls=1)
    rounds = [
        [times(f, repeats=1, warmup=0, calls=calls)["ms"] for f in (base, other)]
        for _ in range(repeats)
    ]
    differences = sorted(arm - plain for plain, arm in rounds)
    return {
        "plain_ms": statistics.median(plain for plain, _ in rounds),
        "ms": statistics.median(arm for _, arm in rounds),
        "p20": sorted(arm for _, arm in rounds)[repeats // 5],
        "difference_ms": statistics.median(differences),
        "difference_p20": differences[repeats // 5],
        "difference_p80": differences[-repeats // 5],
    }


def device_ms(function: Callable[[], Any], own: Collection[str]) -> dict[str, float]:
    """Time that the GPU itself works in one call; and the part of kernels with these names."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    # The profiler lists the host's calls too.
    events = [
        event
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = [(event.name, event.time_range.elapsed_us() / 1e3) for event in events]
    return {
        "all": sum(ms for _, ms in kernels),
        "own": sum(ms for name, ms in kernels if name in own),
    }


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of `function`: its replay is what the device needs, whatever the host does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def cold_start(function: Callable[[], Any]) -> float:
    """Seconds of a first call, compilation included."""
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def copy_bandwidth(gib: int = 2) -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(gib << 29, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / times(lambda: target.copy_(source))["ms"] / 1e9


def provenance(command: str, device: str = "cuda") -> dict[str, Any]:
    """Name the machine, the versions and the command that a number came from.

    On a CPU the machine stands in for the GPU's name, and triton plays no part."""

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return process.stdout.strip()

    chip: dict[str, Any] = {"cpu": f"{os.cpu_count()} cores, {platform.machine()}"}
    if device == "cuda":
        import triton

        chip = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    return {
        "command": command,
        **chip,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
