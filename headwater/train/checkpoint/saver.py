"""The checkpoints of a run, written at once or in the background.

In the background, a save costs training one copy of this rank's tensors into host memory, which on a GPU runs beside
the next step until that updates them; writing, hashing, syncing and committing then go on beside further steps, over
connections of their own. One save at a time: the next one waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.models import ModelConfig
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint.contents import Optimizers, contents
from headwater.train.checkpoint.storage import Planner, Tensors, in_file_order
from headwater.train.distributed.parts import local
from headwater.train.distributed.ranks import Ranks

SLOWEST = timedelta(days=7)  # a disk may be slow: a save that takes long is no rank that hangs


class NotFinite(Exception):
    """Weights, or what the optimizer keeps, are not finite: a checkpoint of them would be of no use."""


def all_finite(tensors: Tensors) -> bool:
    """Look at this rank's part of every tensor; a GPU is waited for once."""
    parts = [local(tensor) for tensor in tensors.values()]
    answers = [part.isfinite().all() for part in parts if part.is_floating_point()]
    # Counters of steps are on the host.
    device = answers[0].device
    return bool(torch.stack([answer.to(device) for answer in answers]).all())


class Saver:
    """`save` returns when the checkpoint is in place, or when it is on its way. A failure on the way is raised by the
    next `save` or `wait`, the same on every rank."""

    def __init__(
        self,
        root: Path,
        model: nn.Module,
        optimizers: Optimizers,
        config: ModelConfig,
        ranks: Ranks,
    ) -> None:
        self.root, self.config, self.ranks = root, config, ranks
        self.model, self.optimizers = model, optimizers
        self.buffers, self.planner = HostBuffers(), Planner()
        self.group: Any = None
        self.thread: BackgroundSave | None = None

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        keep: int,
        before: Callable[[], None],
        background: bool = False,
    ) -> Path:
        """Save a step, if all weights and all of the optimizer are finite.

        Raises: `NotFinite` on every rank if a number on one of them is not; what was saved before stays.
        """
        self.wait()
        # Tensors that are not finite on one rank are saved on none.
        tensors = contents(self.model, self.optimizers)
        if self.ranks.max(int(not all_finite(tensors))):
            raise NotFinite
        options: dict[str, Any] = {"config": self.config, "keep": keep, "before": before}
        options |= {"ranks": self.ranks, "planner": self.planner}
        if not background:
            return checkpoint.save(self.root, step, tensors, state, **options)
        # Training goes on while a thread writes these copies.
        options |= {"values": self.buffers.take(tensors), "group": self._connect()}
        arrived = self.buffers.copied

        def write() -> None:
            if arrived is not None:
                arrived.synchronize()
            checkpoint.save(self.root, step, tensors, state, **options)

        self.thread = BackgroundSave(write)
        self.thread.start()
        return checkpoint.place(self.root, step)

    def _connect(self) -> Any:
        """Ranks talk about a save over gloo, apart from the collectives of the steps that run meanwhile."""
        # The group is made when the first save needs it, by all ranks together.
        if self.group is None and not self.ranks.alone:
            self.group = dist.new_group(backend="gloo", timeout=SLOWEST)
        return self.group

    def before_update(self) -> None:
        """Work that changes the tensors comes after this: it must not overtake a copy."""
        if self.buffers.copied is not None:
            torch.cuda.current_stream(self.buffers.device).wait_event(self.buffers.copied)
            self.buffers.copied = None

    @property
    def failed(self) -> bool:
        """A save in the background has ended with an error. Ranks may learn of it at different steps."""
        return self.thread is not None and self.thread.error is not None

    def wait(self) -> None:
        """Until the save in the background has ended on all ranks; they raise its error, or that there was one."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        thread.join()
        # All ranks stop if one could not write.
        failed = self.ranks.max(int(thread.error is not None))
        if thread.error is not None:
            raise thread.error
        if failed:
            raise UserError("a checkpoint could not be written on another rank: see its message")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Let a save under way arrive, whatever ended the run. Of two errors, the one that ended the run is raised."""
        if error is None:
            self.wait()
        elif self.thread is not None:
            self.thread.join()


class BackgroundSave(threading.Thread):
    """Keeps the error it ended with."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.action = action
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.action()
        except BaseException as error:  # for the thread that waits, whatever it is
            self.error = error


class HostBuffers:
    """Copies in host memory, in the same place for every save; pinned where they come from a GPU, and then complete
    only when `copied` has happened.

    They lie side by side in a few large blocks, in the order of a file: written and hashed tensor by tensor, a save
    would take the interpreter from the training loop twice for each.
    """

    BLOCK = 1 << 28

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.device: torch.device | None = None
        self.stream: torch.cuda.Stream | None = None
        self.copied: torch.cuda.Event | None = None

    def take(self, tensors: Tensors) -> Tensors:
        here = {name: local(tensor) for name, tensor in tensors.items()}
        on_gpu = [tensor.device for tensor in here.values() if tensor.is_cuda]
        # Buffers serve every save until there is more to save, as after the first step.
        if _layout(here) != _layout(self.buffers):
            self.buffers = self._rooms(here, pinned=bool(on_gpu))
        if on_gpu:
            self.device = on_gpu[0]
            self.stream = self.stream or torch.cuda.Stream(self.device)
            # The copy begins when the step is done, and runs beside the next one.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for name, tensor in here.items():
                self.buffers[name].copy_(tensor, non_blocking=True)
                if self.stream is not None and tensor.is_cuda:
                    tensor.record_stream(self.stream)
        self.copied = None if self.stream is None else self.stream.record_event()
        return self.buffers

    def _rooms(self, tensors: Tensors, *, pinned: bool) -> dict[str, Tensor]:
        self.buffers = {}  # not beside the new ones
        remaining = sum(tensor.nbytes for tensor in tensors.values() if tensor.nbytes < self.BLOCK)
        rooms, block, used = {}, torch.empty(0, dtype=torch.uint8), 0
        for name, tensor in in_file_order(tensors):
            size = tensor.nbytes
            if size >= self.BLOCK:
                room = _bytes(size, pinned)
            else:
                if used + size > len(block):
                    block, used = _bytes(min(self.BLOCK, remaining), pinned), 0
                room = block[used : used + size]
                used, remaining = used + size, remaining - size
            rooms[name] = room.view(tensor.dtype).view(tensor.shape)
        return rooms


def _bytes(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _layout(tensors: Tensors) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
