"""New processes of Python without the seconds that importing torch and transformers takes."""

import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from headwater.train.monitor.interrupts import PARENT

# What tests import sooner or later; a fork server does so once for all. It takes longer than most of their work.
PRELOADED = (
    "headwater.train.loop",
    "headwater.cli",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "pytest",
    "transformers.models.llama.modeling_llama",
)


def spare_collector() -> None:
    """What is imported lives to the end. A garbage collector that walks all of it again and again takes a tenth of the
    time; it leaves that alone from here on, and comes more rarely for the rest."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def keep_no_stacks() -> None:
    """Where no GPU is. A seed that waits for one is kept with the stack of its call, as text, three times, and every
    mode of fake tensors with its own, of which DTensor makes one for each new shape: for messages that no test reads.
    From within pytest a stack is sixty frames deep; `torch.manual_seed` takes 0.02 milliseconds instead of 2."""
    import torch._subclasses.fake_tensor
    import torch.mtia
    import torch.xpu

    for module in (torch.cuda, torch.xpu, torch.mtia, torch._subclasses.fake_tensor):
        module.traceback = SimpleNamespace(format_stack=list, extract_stack=list, format_list=list)


def fork_server() -> ForkServerContext:
    """Starts processes that have imported torch already. Their environment is that of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def fork_the_server() -> None:
    """The fork server is a fork of this process, as it is now, instead of a new one that imports the same once more."""
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of what it imports itself
        for name in PRELOADED:
            importlib.import_module(name)
    fork_server()
    multiprocessing.resource_tracker.ensure_running()
    begin, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork_instead
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = begin


def keep_the_server() -> None:
    """In a fork of the process that forked the server, which is no child of this one: whether it lives is not asked."""
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_pid:
        server.ensure_running = multiprocessing.resource_tracker.ensure_running


class Printing:
    """`job`, for a process of the server, which then prints where this one prints."""

    def __init__(self, job: Callable[..., None]) -> None:
        self.job = job

    def __reduce__(self) -> tuple[object, ...]:
        return print_there, (self.job, DupFd(1), DupFd(2))


def print_there(job: Callable[..., None], *streams: object) -> Callable[..., None]:
    for number, stream in enumerate(streams, start=1):
        file = stream.detach()
        os.dup2(file, number)
        os.close(file)
    return job


def fork_instead(path: bytes, command: list[str], kept: Sequence[int]) -> int:
    """`python -c PROGRAM` with these files and the standard ones open, without a new interpreter."""
    if process := os.fork():
        return process
    try:
        spare_collector()
        faulthandler.disable()  # pytest's, which writes to a file that is closed here
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        first = 3
        for file in sorted(kept):
            os.closerange(first, file)
            first = file + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        exec(command[-1], {"__name__": "__main__"})
    finally:
        os._exit(0)


def start(
    folder: Path,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """`python ARGUMENTS`: `-c PROGRAM`, `-m MODULE` or a script, and what it is to find in `sys.argv`. What it prints
    goes to the files `stdout` and `stderr` of `folder`.

    A fork of a process that has imported `PRELOADED` and nothing else: no model has been built there, no class of
    transformers has been patched, no residual has been registered but headwater's own. What a test is to see of imports
    themselves, or of variables that are read at import, needs a process from the beginning: `subprocess`.
    """
    environment = dict(os.environ if env is None else env)
    words, streams = [str(word) for word in arguments], (folder / "stdout", folder / "stderr")
    process = fork_server().Process(
        target=execute, args=(words, cwd or Path.cwd(), environment, streams)
    )
    process.start()
    return process


def python(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> str:
    """What `start` with these arguments prints; an exit code other than 0 fails, with what it says of its errors."""
    with tempfile.TemporaryDirectory() as name:
        process = start(Path(name), *arguments, cwd=cwd, env=env)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        shown, errors = (
            Path(name, stream).read_text(encoding="utf-8") for stream in ("stdout", "stderr")
        )
    assert process.exitcode == 0, f"exit code {process.exitcode}\n{shown}\n{errors}"
    return shown


class Forked:
    """Stands in for the `subprocess.Popen` of headwater.train.jobs: the same runs, without their imports. They are no
    children of this process, so they do not look after it: test_orphans_save_and_end has real ones."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: object
    ) -> None:
        environment = {name: value for name, value in env.items() if name != PARENT}
        streams = (Path(stdout.name), Path(stdout.name))
        words = ["-m", "headwater", *command[command.index("headwater.cli") + 1 :]]
        self._process = fork_server().Process(
            target=execute, args=(words, Path.cwd(), environment, streams)
        )
        self._process.start()
        self.terminate = self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def execute(
    words: list[str], cwd: Path, environment: dict[str, str], streams: tuple[Path, Path]
) -> None:
    """In the new process."""
    spare_collector()
    for number, stream in enumerate(streams, start=1):
        with stream.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ |= environment
    os.chdir(cwd)
    first, *rest = words
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first in ("-c", "-m"):
        sys.path[:0] = [str(cwd), *paths]
        what, *rest = rest
        sys.argv = [first, *rest]
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:0] = [str(Path(cwd, first).parent), *paths]
        sys.argv = [first, *rest]
        runpy.run_path(str(Path(cwd, first)), run_name="__main__")
