"""Ranks as processes of this machine, connected by gloo."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from processes import Printing, fork_server, spare_collector


@contextmanager
def precise() -> Iterator[None]:
    """Muon in fp32: rounded to bf16, gradients that differ in the last bit may end in different updates."""
    cast = torch.Tensor.to

    # What torch 2.15 says instead of bfloat16
    def to(self: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        return (
            self.clone()
            if how == {"dtype": torch.bfloat16, "copy": True}
            else cast(self, *args, **how)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        patch.setattr(torch.Tensor, "to", to)
        yield


def spawn(world: int, job: Callable[..., None], *arguments: Any, minutes: int = 5) -> None:
    """`job(*arguments)` in `world` processes at once; an error in one of them, or no end in time, is raised."""
    fork_server()
    arguments = (world, free_port(), job, arguments)
    context = torch.multiprocessing.start_processes(
        Printing(enter), arguments, world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + 60 * minutes
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world} ranks did not end in {minutes} minutes")


def torchrun(log: Path, *arguments: str, fork: bool = True) -> ForkServerProcess:
    """torchrun itself, writing to `log`: a fork of a process that has imported torch already. With `fork` its workers
    are so, too, and run their script to the end instead of calling sys.exit(0); else it starts them as it does for a
    user, as new processes."""
    forks = ["--run-path", "--start-method", "fork"] if fork else []
    process = fork_server().Process(target=launch, args=(log, [*forks, *arguments]))
    process.start()
    return process


def launch(log: Path, arguments: list[str]) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import main

    # Who calls, for a record of its own: by inspect.stack() it looks through the sources of all that is imported here.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    spare_collector()
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    main(arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def enter(
    rank: int,
    world: int,
    port: int,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
    **options: Any,
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    spare_collector()
    job(*arguments, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
