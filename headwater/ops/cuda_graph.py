"""Record what a function does on the GPU as a CUDA graph, which the host then runs in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NotCaptured(RuntimeError):
    """A function cannot be recorded; the message says why, in a line."""


def record(
    function: Callable[[], None],
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Record a function without running it.

    Arguments:
        function: takes and returns nothing, and launches on the current GPU, always with tensors in
            the same places. It must have run before, so that whatever it compiles or allocates once
            is there.
        pool: memory of a graph that never runs at the same time, to share.
        stream: the stream that records; by default one that all recordings share.

    Returns the graph: `.replay()` runs it, `.pool()` is its memory.

    Raises NotCaptured. Stream, random numbers and memory are then as before, and the function can
        be called as it is.
    """
    graph = torch.cuda.CUDAGraph()
    stream_before = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    numbers_before = generator.clone_state()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            function()
    except RuntimeError as error:
        # A recording that cannot be ended leaves its stream the current one and keeps the random
        # numbers: the next number drawn on this GPU, by anyone, would be an error.
        torch.cuda.set_stream(stream_before)
        generator.graphsafe_set_state(numbers_before)
        torch.cuda.synchronize()
        # The error that broke the recording off comes first.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise NotCaptured(str(cause).strip().splitlines()[0]) from error
    return graph
