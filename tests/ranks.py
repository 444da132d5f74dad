"""Ranks as processes of this machine, connected by gloo."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing


def spawn(world: int, job: Callable[..., None], *arguments: Any, minutes: int = 5) -> None:
    """`job(*arguments)` in `world` processes at once; an error in one of them, or no end in time, is raised."""
    context = torch.multiprocessing.spawn(enter, (world, free_port(), job, arguments), nprocs=world, join=False)
    deadline = time.monotonic() + 60 * minutes
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world} ranks did not end in {minutes} minutes")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def enter(
    rank: int, world: int, port: int, job: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    job(*arguments, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
