"""Attention Residuals (Kimi Team, arXiv 2603.15031): each sublayer chooses, by attention over depth, what it reads."""

from collections.abc import Sequence
from math import ceil
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from headwater.ops import Backend, depth_attention, mix_sources
from headwater.ops.banks import mix_bank, project_source
from headwater.ops.depth import weigh_sources
from headwater.ops.depth.reference import depth_weights, fold, stack_wide
from headwater.ops.numerics import accumulation_dtype, wide
from headwater.ops.routing import use_triton

from .base import Layout, Next, Norm, Placed, Residual, State, apply_norm, hold, weights_held
from .one_token import BlockSources
from .registry import register
from .two_phase import TwoPhase

Query = Literal["static", "projected"]
Weights = Literal["softmax", "sigmoid", "static"]
Scale = Literal["one", "root", "width", "gain"]
Schedule = Literal["auto", "one-pass", "two-phase"]
# Numbers in the outputs of all sublayers from which a CPU trains faster in two phases: more operators, on less.
# Reads and writes of 8, 24 or 48 sublayers take about as long either way at 2 ** 19, and at 2 ** 15 1.6 times as long.
WORTH_TWO_PHASES = 2**19


def default_block(sublayers: int) -> int:
    """About eight blocks; of two sublayers at least, or it would be Full Attention Residuals."""
    return min(max(2, ceil(sublayers / 8)), sublayers)


class DepthRead(nn.Module):
    """The parameters of one read over `sources` sources."""

    def __init__(
        self,
        dim: int,
        key_dim: int,
        sources: int,
        *,
        query: Query,
        weights: Weights,
        key_weight: bool,
        heads: int,
        scale: Scale,
        start: float,
    ) -> None:
        super().__init__()
        self.query: nn.Parameter | None = None
        self.key_weight: nn.Parameter | None = None
        self.scalars: nn.Parameter | None = None
        self.gain: nn.Parameter | None = None
        if weights == "static":
            self.scalars = nn.Parameter(torch.full((sources, heads), 1.0 / sources))
            return
        shape = (key_dim,) if query == "static" else (key_dim, dim)
        self.query = nn.Parameter(start * torch.randn(shape) if start else torch.zeros(shape))
        self.factor = {"one": 1.0, "root": key_dim**-0.5, "width": 1 / key_dim, "gain": 1.0}[scale]
        if scale == "gain":
            self.gain = nn.Parameter(torch.zeros(1))
        if key_weight:
            self.key_weight = nn.Parameter(torch.ones(key_dim))

    def scaled_query(self) -> Tensor:
        """The query that scores: the parameter, times what `scale` makes of it."""
        query = cast(Tensor, self.query)
        if self.gain is not None:
            return self.gain * torch.nn.functional.normalize(query, dim=-1)
        return query if self.factor == 1 else self.factor * query


def _stack(tensors: list[Tensor], device: torch.device | None) -> Tensor:
    """On the device, or where the first is. The host's time counts: nothing is asked of a tensor that is there."""
    device = tensors[0].device if device is None else device
    return torch.stack(
        [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]
    )


def _trains(x: Tensor) -> bool:
    """Whether a pass that begins with `x` has gradients, or will be repeated with them: re-entrant checkpointing makes
    its first pass without, of an embedding that has some, and both must give states of one layout."""
    return torch.is_grad_enabled() or x.requires_grad


FULL = "h_i = sum_n softmax_n(<q_i, RMSNorm(v_n)>) v_n over the embedding v_0 and every output v_1, ..., v_i before it."


@register("attnres-block")
@register("attnres-full", formula=FULL, block=1)
class AttentionResidual(Residual):
    """h_i = sum_n softmax_n(<q_i, RMSNorm(b_n)>) b_n over the embedding b_0, finished block sums b_n, the running sum.

    `block`: sublayers whose outputs are summed to one source, by default an eighth of all, two at least; 1 is Full
        Attention Residuals, every output a source.
    At initialisation: queries are zero, so a read is the mean of its sources, which is the plain residual up to a
    positive scale that the reader's pre-norm cancels. A read of one source is that source and has no parameters.
    Cost: 2 D parameters a read; the state holds one tensor per source; reads move N + 1 passes each.

    Options, after the paper's ablation: `query` static, or projected from the normed newest source (D x D a read,
    zero at start); `weights` softmax, sigmoid, or static scalars (1/N at start); `key_norm`: whether keys are normed;
    `heads`: groups of channels, each with weights of its own; `window`: only the embedding and so many newest sources
    are kept; `key_dim`: low-rank keys, the last so many channels of a source (arXiv 2607.09694), values stay whole;
    `key_weight`: whether the keys' norm has a weight; `start`: queries are drawn with this standard deviation, zero
    unless given; `scale` of a query: one, root (1 / sqrt(D)), width (1 / D), or gain, a learned number, zero at start,
    times a query of length one, which is drawn.
    How it is computed: `backend` as in `headwater.depth_attention` (query, weights, key_norm, heads and key_dim have
    kernels by the name triton alone; several heads with static weights, or with key_dim, none); `schedule` auto (in two
    phases where kernels run, and where a CPU trains in fp32 what is not tiny, else read by read), one-pass, or
    two-phase (over the kernels; with backend=reference over the plain operators, on any device).
    Attention Residuals, arXiv 2603.15031.
    """

    at_start = "scaled"
    derived = ("block",)

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        block: int | None = None,
        query: Query = "static",
        weights: Weights = "softmax",
        key_norm: bool = True,
        heads: int = 1,
        window: int | None = None,
        key_dim: int | None = None,
        key_weight: bool = True,
        scale: Scale = "one",
        start: float | None = None,
        eps: float = 1e-6,
        backend: Backend = "auto",
        schedule: Schedule = "auto",
    ) -> None:
        super().__init__(dim, sublayers)
        for name, value, kind in (
            ("query", query, Query),
            ("weights", weights, Weights),
            ("scale", scale, Scale),
            ("backend", backend, Backend),
            ("schedule", schedule, Schedule),
        ):
            if value not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got '{value}'"
                )
        start = float(scale == "gain") if start is None else start
        if start < 0 or (scale == "gain" and start == 0):
            raise ValueError(
                f"start is a standard deviation, above zero with scale=gain, got {start}"
            )
        if (scale == "gain" and query != "static") or (
            weights == "static" and (scale != "one" or start)
        ):
            raise ValueError(
                "scale and start are of the queries that weights come from, scale=gain of static ones"
            )
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if block is None:
            block = default_block(sublayers)
        if not 1 <= block <= sublayers:
            raise ValueError(
                f"block counts sublayers and must lie between 1 and {sublayers}, got {block}"
            )
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the width {dim}, got {heads}")
        if window is not None and not 1 <= window <= ceil(sublayers / block):
            raise ValueError(
                f"window counts sources besides the embedding and must lie between 1 and {ceil(sublayers / block)} "
                f"({sublayers} sublayers in blocks of {block}), got {window}"
            )
        if key_dim is not None and not (1 <= key_dim <= dim and key_dim % heads == 0):
            raise ValueError(
                f"key_dim must lie between 1 and {dim} and be a multiple of heads ({heads}), got {key_dim}"
            )
        forgets = window is not None and window < ceil(sublayers / block)
        if forgets or (start and scale != "gain"):
            self.at_start = (
                "different"  # outputs older than the window are gone; weights are not even
            )
        self.block = block
        self.query_kind, self.heads, self.window, self.eps = query, heads, window, eps
        self.weighing: dict[str, Any] = {
            "eps": eps, "heads": heads, "softmax": weights == "softmax", "key_norm": key_norm
        }  # fmt: skip
        self.backend: Backend = backend
        self.key_dim = dim if key_dim is None else key_dim
        self.mixes = "scalar" if heads == 1 else "channel"
        whole = self.key_dim == dim
        self.kernels = heads == 1 or (
            whole and weights != "static"
        )  # there are some for these options
        if backend == "triton" and not self.kernels:
            raise ValueError(
                "backend=triton has several heads of whole keys alone, and not with weights=static"
            )
        self.usual = (
            query == "static" and weights == "softmax" and key_norm and whole and heads == 1
        )
        # Kernels of the options have not been timed on a GPU: they run where they are asked for by name.
        self.chosen: Backend = "reference" if backend == "auto" and not self.usual else backend
        self.fused = self.kernels and self.chosen != "reference"
        self.phased = self.usual and window is None  # can be computed in two phases
        if schedule == "two-phase" and not self.phased:
            raise ValueError(
                "schedule=two-phase needs static queries, softmax weights, normed whole keys, one head, no window"
            )
        self.reads_at_once = block
        self.schedule: Schedule = schedule
        self.two_phase = None
        if self.phased and schedule != "one-pass":
            by_name = (
                schedule == "two-phase" and backend == "auto"
            )  # then kernels run, or say why not
            self.two_phase = TwoPhase(
                sublayers, block, eps, backend="triton" if by_name else backend
            )
        parts: dict[str, Any] = {
            "query": query,
            "weights": weights,
            "key_weight": key_norm and key_weight,
        }
        self.reads = nn.ModuleDict(
            {
                str(i): DepthRead(
                    dim, self.key_dim, n, **parts, heads=heads, scale=scale, start=start
                )
                for i in range(sublayers + 1)
                if (n := self.num_sources(i)) > 1
            }
        )

    def num_sources(self, i: int) -> int:
        """The sources of read `i`: the embedding, and one for each block begun before it, at most `window` of them."""
        begun = ceil(i / self.block)
        return 1 + (begun if self.window is None else min(begun, self.window))

    def layout(self, i: int) -> Layout:
        return ("embedding", *(f"block {n}" for n in range(self.num_sources(i) - 1)))

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """The sources alone, or the state of two phases."""
        return (self.layout(i), *(() if self.two_phase is None else self.two_phase.layout(verb, i)))

    def check(self, state: State, verb: Next, i: int) -> None:
        super().check(state, verb, i)
        if (
            isinstance(state, Placed)
            or self.two_phase is None
            or not self.two_phase.holds(state, verb, i)
        ):
            return
        shape, rows = (
            self.two_phase.unpack(state, verb, i).folded.shape,
            self.two_phase.last - self.two_phase.first,
        )
        if shape != (rows, self.dim):  # a kernel would read what lies behind
            raise ValueError(
                f"{verb} {i} of '{self.spec}' got a state that was cut, whose queries are {tuple(shape)} and not "
                f"{(rows, self.dim)}: take residual.settle(state, i) before read i, and select in its tensors"
            )

    def _begin(self, x: Tensor) -> State:
        if (
            self.two_phase is None
            or weights_held()
            or self._enters_late(x)
            or not self._runs_two_phases(x)
        ):
            return (x,)
        return self.two_phase.begin(x, self._folded(x.device))

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        if self.two_phase is not None and self.two_phase.holds(state, "read", i):
            if not (self._learns(i) and self.two_phase.has_lost_gradients(state, i)):
                return self.two_phase.read(state, i, norm)
            state = self.two_phase.settle(state, i)
        x, state = self._mix(state, i)
        return apply_norm(norm, x), state

    def _learns(self, i: int) -> bool:
        """Whether read `i` has a query that is to have a gradient here."""
        if not torch.is_grad_enabled() or self.keys[i] not in self.reads:
            return False
        query = self._parameters_of(i).query
        return query is not None and query.requires_grad

    def _write(self, state: State, i: int, y: Tensor) -> State:
        if y.dtype != state[0].dtype:  # asked first: `to` takes the host 10 us for nothing
            y = y.to(state[0].dtype)
        if self.two_phase is not None and self.two_phase.holds(state, "write", i):
            return self.two_phase.write(state, i, y)
        if (
            i == 0
            and self.two_phase is not None
            and self._enters_late(state[0])
            and self._runs_two_phases(state[0])
        ):
            return self.two_phase.write(
                self.two_phase.enter(state[0], self._folded(y.device)), 0, y
            )
        if i % self.block:
            return (*state[:-1], state[-1] + y)
        if self.num_sources(i) == self.num_sources(
            i + 1
        ):  # the window is full: its oldest source goes
            state = (state[0], *state[2:])
        return (*state, y)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return self._read(state, self.sublayers, norm)[0]

    def _weights(self, state: State, i: int) -> Tensor:
        return self._weights_of(stack_wide(self.settle(state, i)), i)

    def folds_norm(self, state: State, i: int) -> bool:
        two_phase = self.two_phase
        return (
            two_phase is not None
            and two_phase.holds(state, "read", i)
            and not two_phase.plain(state[0])
        )

    def settle(self, state: State, i: int) -> State:
        if self.two_phase is not None and self.two_phase.holds(state, "read", i):
            return self.two_phase.settle(state, i)
        return state

    def adopt(self, state: State, i: int) -> State:
        if (
            self.two_phase is None
            or i != self.two_phase.first
            or not self._runs_two_phases(state[0])
        ):
            return state
        return self.two_phase.adopt(state, self._folded(state[0].device))

    def one_token(self, stream: Tensor, backend: Backend) -> BlockSources | None:
        if not self.phased or self.backend == "reference" or type(self) is not AttentionResidual:
            return None
        queries, count = self.folded_queries(device=stream.device), self.num_sources(self.sublayers)
        return BlockSources(self.block, self.eps, queries, count, stream, backend)

    def keep_only(self, start: int, stop: int) -> None:
        super().keep_only(start, stop)
        if self.two_phase is not None:
            self.two_phase = TwoPhase(
                self.sublayers,
                self.block,
                self.eps,
                first=start,
                stop=stop,
                backend=self.two_phase.backend,
            )
        self.forget_layouts()

    def _enters_late(self, x: Tensor) -> bool:
        """Whether two phases begin at write 0, since read 0 is the embedding: to gather the queries takes the host a
        millisecond, in which a GPU then has the first sublayer to run. Gradients are threaded from the start."""
        return not (_trains(x) or torch.compiler.is_compiling() or weights_held())

    def _runs_two_phases(self, x: Tensor) -> bool:
        """Whether reads of a stream that begins as `x` are made in two phases."""
        if self.schedule == "two-phase":
            return self.backend == "reference" or use_triton("triton", x)
        return use_triton(self.backend, x) or self._trains_on_cpu(x)

    def _trains_on_cpu(self, x: Tensor) -> bool:
        """Whether two phases over the plain operators beat reads one by one: on a CPU, in a pass with gradients, of a
        model that is not tiny. Not in half precision, which would round between the phases, nor compiled, which fuses
        each read, and would take two to three times as long to compile. Without gradients a prompt would be read faster
        and a token by itself more slowly. Queries on another device are there because their layers are: the state will
        not stay here."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return False
        if not _trains(x) or x.numel() * self.sublayers < WORTH_TWO_PHASES:
            return False
        return all(parameter.device == x.device for parameter in self.reads.parameters())

    def _folded(self, device: torch.device | None = None) -> Tensor:
        """`folded_queries` of the reads of two phases."""
        assert self.two_phase is not None
        return self.folded_queries(self.two_phase.first, self.two_phase.last, device)

    def folded_queries(
        self, start: int = 0, stop: int | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Query times key weight of reads [start, stop), by default all with the final one, (R, D) on `device` in fp32
        (of fp64, fp64); read 0 has one source and a row of zeros. For static queries and normed keys (`phased`).

        Where layers are spread over devices, so are their queries.
        """
        first, stop = max(1, start), self.sublayers + 1 if stop is None else stop
        table = (
            self.reads
        )  # looked up once: a module's own attributes take the host a microsecond each
        reads = [cast(DepthRead, table[self.keys[i]]) for i in range(first, stop)]
        if not reads:  # a pipeline stage of the first sublayer alone
            return torch.zeros(1, self.dim, device=device)
        folded = _stack([read.scaled_query() for read in reads], device)
        folded = folded.to(accumulation_dtype(folded.dtype))
        if reads[0].key_weight is not None:
            folded = folded * _stack([cast(Tensor, read.key_weight) for read in reads], device).to(
                folded.dtype
            )
        return torch.nn.functional.pad(folded, (0, 0, first - start, 0))

    def flops_per_token(self) -> int:
        reads = sum(n for i in range(self.sublayers + 1) if (n := self.num_sources(i)) > 1)
        projections = (
            2 * self.dim * self.key_dim * len(self.reads) if self.query_kind == "projected" else 0
        )
        return (
            (4 * self.key_dim + 2 * self.dim) * reads + projections + 2 * self.dim * self.sublayers
        )

    def _parameters_of(self, i: int) -> DepthRead:
        return cast(DepthRead, self.reads[self.keys[i]])

    def _mix(self, state: State, i: int) -> tuple[Tensor, State]:
        """Read `i`, and the state, whose sources may be threaded (see `ops.depth.autograd`)."""
        if i == 0:
            return state[0], state
        if weights_held() or not self.kernels:
            stack = stack_wide(state)
            return mix_sources(stack, hold(self._weights_of(stack, i))).to(state[0].dtype), state
        read, thread = self._parameters_of(i), i < self.sublayers
        if read.scalars is not None:
            (x,), state = mix_bank(state, wide(read.scalars).T, thread=thread, backend=self.chosen)
            return x, state
        if self.usual:
            query = read.scaled_query()
            return depth_attention(
                state, query, read.key_weight, eps=self.eps, backend=self.backend
            ), state
        query, key_weight, newest = self._query(read, state[-1], self.chosen)
        state = (*state[:-1], newest)
        return weigh_sources(
            state, query, key_weight, **self.weighing, thread=thread, backend=self.chosen
        )

    def _weights_of(self, stack: Tensor, i: int) -> Tensor:
        """(N, ..., H) for stack (N, ..., D)."""
        if len(stack) == 1:
            return torch.ones(
                1, *stack.shape[1:-1], self.heads, device=stack.device, dtype=stack.dtype
            )
        read = self._parameters_of(i)
        if read.scalars is not None:
            shape = (-1, *[1] * (stack.dim() - 2), self.heads)
            return read.scalars.to(stack.dtype).view(shape).expand(*stack.shape[:-1], self.heads)
        query, key_weight, _ = self._query(read, stack[-1], "reference")
        return depth_weights(stack, query, key_weight, **self.weighing)

    def _query(
        self, read: DepthRead, newest: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The query, the weight that keys have beside it, and the newest source, to be read in its place. Of a query
        that is projected, the weight multiplies the projection's rows instead."""
        query, key_weight = read.scaled_query(), read.key_weight
        if self.query_kind == "static":
            return query, key_weight, newest
        rows = fold(
            query,
            None if key_weight is None else key_weight.unsqueeze(-1),
            accumulation_dtype(query.dtype),
        )
        projected, newest = project_source(newest, rows, self.eps, backend=backend)
        return projected, None, newest
