"""Continuing prompts on several ranks: tensor parallelism, with a prompt's tokens divided too.

N ranks read a prompt of T tokens together. Between bodies each rank has T / N of the tokens and
only their sources: the bank takes 1 / N of the memory. On the way into attention or MLP tokens are
gathered; on the way out results are summed over the ranks and divided again (`tensor_parallel`). A
rank keeps the keys and values of its heads. The last tokens of a prompt, N at most, and the drawn
tokens are too few to divide: all ranks have them, and sum what leaves a body. With numbers of e
bytes, through L sublayers of width D, a rank sends

    2 (N - 1) / N * L B T D e    bytes for B prompts of T tokens
    2 (N - 1) / N * L B D e      bytes for one more token of each
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from headwater._torch import group_name
from headwater.errors import UserError
from headwater.generation.generate import Engine
from headwater.generation.next_token import Draw
from headwater.generation.prompt_portions import free_bytes
from headwater.generation.prompts import CachedReader, Reader
from headwater.generation.sampling import Portion
from headwater.models import Decoder
from headwater.models.cache import Cache
from headwater.runs.settings import ParallelSettings
from headwater.train.data.tokenizer import Tokenizer
from headwater.train.distributed.ranks import gathered
from headwater.train.distributed.tensor_parallel import (
    Exchange,
    divide_parameters,
    refuse_undivided,
    route,
)
from headwater.train.load import load_run


class TensorParallelEngine(Engine):
    """A decoder on the ranks of a mesh: each calls `headwater.generate` with the same arguments.

    Arguments:
        model: the whole decoder, the same on every rank. It is divided in place; move it to a GPU
            afterwards.
        mesh: the ranks that share the work, along one axis.

    Raises UserError for a model that cannot be divided among the ranks.

        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (8,))
        headwater.generate(TensorParallelEngine(model, mesh), [[1, 2, 3]], max_new_tokens=20)
    """

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model)
        # Each rank keeps its part of the matrices, and forgets the rest.
        size, rank = mesh.size(), mesh.get_local_rank()
        refuse_undivided(model.config, size, 1)

        def share(parameter: Tensor, placement: Placement) -> Tensor:
            if not isinstance(placement, Shard):
                return parameter
            return parameter.chunk(size, placement.dim)[rank].clone()

        divide_parameters(model, share)
        self.group = mesh.get_group()
        self.exchange = Exchange(size, group_name(self.group), rank)
        self.exchange.divides = False
        route(model, self.exchange)

    def reader(
        self, rows: list[list[int]], new: int, chunk: Portion, use_cache: bool, graph: bool
    ) -> Reader:
        # Without a cache every rank reads everything again.
        reader = Reader(self.model, rows)
        if use_cache:
            reader = SharedReader(self.model, rows, new, chunk, self.exchange, self.group)
        return AgreedReader(reader, self.group)


@contextmanager
def divided_run(
    folder: Path, device: str, tensor: int
) -> Iterator[tuple[TensorParallelEngine, Tokenizer]]:
    """Load a run's decoder on the `tensor` ranks that torchrun has started, and its tokenizer."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != tensor or tensor < 1:
        raise UserError(
            f"--tensor {tensor} needs as many processes, and there are {world}. Start them with: "
            f"torchrun --standalone --nproc-per-node {tensor} -m headwater.cli generate ... "
            f"--tensor {tensor}"
        )
    place = torch.device(device)
    if place == torch.device("cuda"):
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    # Every rank reads the whole model; dividing drops what is not its own.
    run = load_run(folder)
    with gathered(ParallelSettings(tensor=tensor), place) as ranks:
        assert ranks.mesh is not None
        engine = TensorParallelEngine(run.model, ranks.mesh["tensor"])
        engine.model.to(place)
        yield engine, run.tokenizer


class AgreedReader(Reader):
    """Reads as another reader, and continues with the first rank's tokens on all ranks.

    The last bits of the ranks' logits may differ.
    """

    def __init__(self, reader: Reader, group: dist.ProcessGroup) -> None:
        super().__init__(reader.model, reader.rows)
        self.reader, self.group = reader, group

    def tokens(self, draw: Draw, drawn: list[list[int]], count: int) -> Iterator[list[int]]:
        for new in self.reader.tokens(draw, drawn, count):
            # Logits may differ in their last bits, and then so would the tokens.
            tokens = torch.tensor(new, device=self.device)
            dist.broadcast(tokens, group=self.group, group_src=0)
            yield tokens.tolist()


class SharedReader(CachedReader):
    """Reads prompts with the tokens divided among the ranks."""

    def __init__(
        self,
        model: Decoder,
        rows: list[list[int]],
        new: int,
        chunk: Portion,
        exchange: Exchange,
        group: dist.ProcessGroup,
    ) -> None:
        self.exchange, self.group = exchange, group
        super().__init__(model, rows, new, chunk)

    def free_bytes(self) -> int | None:
        """Bytes of the rank that has least: portions must be the same on all, and so must a
        refusal."""
        free = free_bytes(self.device)
        if free is None:
            return None
        least = torch.tensor(free, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def read(self, texts: Tensor, cache: Cache) -> Tensor:
        size, rank = self.exchange.size, self.exchange.rank
        # The rest, at least the last token, is on all ranks.
        divided = (texts.shape[1] - 1) // size * size
        portion_size = max(1, (self.chunk or divided) // size) * size
        if divided:
            with dividing(self.exchange):
                for portion in texts[:, :divided].split(portion_size, dim=1):
                    share = portion.chunk(size, dim=1)[rank]
                    self.model.hidden(share, cache, last=True)
                    # The decoder has counted the share; attention has seen the whole portion.
                    cache.lengths.advance(portion.shape[1] - share.shape[1])
        return self.model.hidden(texts[:, divided:], cache)


@contextmanager
def dividing(exchange: Exchange) -> Iterator[None]:
    """Inside, tokens are divided between the bodies."""
    exchange.divides = True
    try:
        yield
    finally:
        exchange.divides = False
