"""Attention Residuals (Kimi Team, arXiv 2603.15031): each sublayer chooses what it reads, by
attention over depth."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headwater.ops import Backend, depth_attention, mix_sources
from headwater.ops.depth.reference import depth_weights, fold, stack_wide
from headwater.ops.numerics import accumulation_dtype, project_normed, rms_scale, wide
from headwater.ops.routing import use_triton

from .base import Layout, Next, Norm, Placed, Read, Residual, State, apply_norm, hold, weights_held
from .numerics import combine
from .one_token import BlockSources
from .options import check_range
from .registry import register
from .two_phase import TwoPhase

Query = Literal["static", "projected"]
Weights = Literal["softmax", "sigmoid", "static"]
Scale = Literal["one", "root", "width", "gain"]
Schedule = Literal["auto", "one-pass", "two-phase"]
# Two phases take more operators, each over less. On a CPU they train faster from this many numbers
# on, counted in the outputs of all sublayers: with 8, 24 or 48 sublayers both ways take equally
# long at 2 ** 19, and one pass is 1.6 times as fast at 2 ** 15.
WORTH_TWO_PHASES = 2**19


def default_block(sublayers: int) -> int:
    """Return the block size that gives about eight blocks.

    It is two sublayers at least, since blocks of one are Full Attention Residuals.
    """
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
        # Nothing is drawn for queries of zero: torch's generator stays where it is.
        numbers = start * torch.randn(shape) if start else torch.zeros(shape)
        self.query = nn.Parameter(numbers)
        factors = {"one": 1.0, "root": key_dim**-0.5, "width": 1 / key_dim, "gain": 1.0}
        self.factor = factors[scale]
        if scale == "gain":
            self.gain = nn.Parameter(torch.zeros(1))
        if key_weight:
            self.key_weight = nn.Parameter(torch.ones(key_dim))

    def scaled_query(self) -> Tensor:
        """Return the query that scores sources: the parameter, scaled as the option `scale`
        says."""
        query = cast(Tensor, self.query)
        if self.gain is not None:
            return self.gain * torch.nn.functional.normalize(query, dim=-1)
        return query if self.factor == 1 else self.factor * query


FULL = (
    "h_i = sum_n softmax_n(<q_i, RMSNorm(v_n)>) v_n over the embedding v_0 and every output "
    "v_1, ..., v_i before it."
)
USUAL = "static queries, softmax weights, normed whole keys, raw values and one head"


@register("attnres-block")
@register("attnres-full", formula=FULL, block=1)
class AttentionResidual(Residual):
    """h_i = sum_n softmax_n(<q_i, RMSNorm(b_n)>) b_n over the embedding b_0, finished block sums b_n, the running sum.

    At initialisation: queries are zero, so a read is the mean of its sources, which is the plain
    residual up to a positive scale that the reader's pre-norm cancels. A read of one source is that
    source and has no parameters.
    Cost: 2 D parameters per read; the state holds one tensor per source; reads move N + 1 passes
    each.

    `block`: this many sublayers add their outputs to one source, by default an eighth of them all
        and at least two, where 1 is Full Attention Residuals, every output a source.
    `window`: a read sees the embedding and only this many of the newest sources.
    `query`: static is a parameter, projected is made from the normed newest source by a D x D
        matrix per read that starts at zero.
    `weights`: softmax over the sources, a sigmoid for each, or static scalars that start at 1/N.
    `values`: sources are raw, or normed as keys are, without a weight; the mean of normed sources
        at the start is not the plain residual.
    `heads`: this many groups of channels have weights of their own.
    `key_norm`: keys are RMS-normed.
    `key_weight`: the norm of the keys has a weight.
    `key_dim`: keys are only this many of a source's channels, the last (arXiv 2607.09694), and
        values stay whole.
    `scale`: the query is multiplied by one, root (1 / sqrt(D)), width (1 / D), or gain, which is a
        learned number that starts at zero, times a query of length one.
    `start`: queries are drawn with this standard deviation, by default zero, and one with
        scale=gain.
    `backend`: as in `headwater.depth_attention`, whose kernels are for static queries, softmax
        weights, normed whole keys, raw values and one head.
    `schedule`: one-pass makes read after read, two-phase all reads of a block together, and auto
        takes two phases where kernels run, and where a CPU trains a model in fp32 that is not tiny.
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
        values: Literal["raw", "normed"] = "raw",
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
        block = default_block(sublayers) if block is None else block
        key_dim = dim if key_dim is None else key_dim
        start = float(scale == "gain") if start is None else start
        check_range("block", block, 1, sublayers)
        check_range("heads", heads, 1, dim)
        check_range("key_dim", key_dim, 1, dim)
        if window is not None:
            check_range("window", window, 1, ceil(sublayers / block))
        if dim % heads or key_dim % heads:
            raise ValueError(
                f"heads must divide the width, {dim}, and key_dim, {key_dim}, got {heads}"
            )
        if weights == "static" and (scale != "one" or start):
            raise ValueError("scale and start set up queries, which weights=static does not have")
        if scale == "gain" and (query != "static" or not start):
            raise ValueError("scale=gain needs query=static and a start above zero")
        self.block = block
        self.window = window
        self.values = values
        self.takes_zero = values == "raw"
        self.heads = heads
        self.key_dim = key_dim
        self.query_kind = query
        self.eps = eps
        self.backend: Backend = backend
        self.schedule: Schedule = schedule
        self.reads_at_once = block
        self.mixes = "scalar" if heads == 1 else "channel"
        # Outputs older than a window are gone; normed sources have lost their sizes; random queries
        # weigh sources unevenly, unless a gain of zero hides them.
        forgets = window is not None and window < ceil(sublayers / block)
        if forgets or values == "normed" or (start and scale != "gain"):
            self.at_start = "different"
        self.weighing: dict[str, Any] = {
            "eps": eps,
            "heads": heads,
            "softmax": weights == "softmax",
            "key_norm": key_norm,
        }

        # Which way reads are made follows from the options, here and nowhere else.
        self.reader = READERS[query, weights]
        whole_keys = key_norm and key_dim == dim
        if heads > 1 or values == "normed" or (self.reader is attend and not whole_keys):
            self.reader = mix_by_weights
        usual = self.reader is attend
        self.phased = usual and window is None
        self.fused = usual and backend != "reference"
        if backend == "triton" and not usual:
            raise ValueError(f"backend=triton needs {USUAL}: take backend=auto")
        if schedule == "two-phase" and not self.phased:
            raise ValueError(f"schedule=two-phase needs {USUAL}, and no window")
        # A schedule that is asked for by name runs the kernels, or says why they cannot run.
        by_name = "triton" if backend == "auto" else backend
        over = {"auto": backend, "two-phase": by_name, "one-pass": None}[schedule]
        self.two_phase = None
        if self.phased and over is not None:
            self.two_phase = TwoPhase(sublayers, block, eps, backend=over)

        options: dict[str, Any] = {"query": query, "weights": weights, "heads": heads}
        options |= {"scale": scale, "start": start, "key_weight": key_norm and key_weight}
        self.reads = nn.ModuleDict()
        for i in range(sublayers + 1):
            # A read of one source has nothing to choose.
            sources = self.num_sources(i)
            if sources > 1:
                self.reads[str(i)] = DepthRead(dim, key_dim, sources, **options)

    def num_sources(self, i: int) -> int:
        """Count the sources of read `i`: the embedding, and one per block begun before it, at most
        `window`."""
        # A block is begun by its first output.
        begun = ceil(i / self.block)
        return 1 + (begun if self.window is None else min(begun, self.window))

    def layout(self, i: int) -> Layout:
        return ("embedding", *(f"block {n}" for n in range(self.num_sources(i) - 1)))

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """The sources alone, or the state of two phases."""
        if self.two_phase is None:
            return (self.layout(i),)
        return (self.layout(i), *self.two_phase.layout(verb, i))

    def check(self, state: State, verb: Next, i: int) -> None:
        super().check(state, verb, i)
        two_phase = self._schedule_of(state, verb, i)
        if two_phase is None or isinstance(state, Placed):
            return
        # Queries that were cut would let a kernel read what lies behind them.
        shape = two_phase.unpack(state, verb, i).folded.shape
        expected = (two_phase.last - two_phase.first, self.dim)
        if shape != expected:
            raise ValueError(
                f"{verb} {i} of '{self.spec}' takes queries {expected} in its state, got "
                f"{tuple(shape)}: cut the tensors of residual.settle(state, i) instead"
            )

    def _schedule_of(self, state: State, verb: Next, i: int) -> TwoPhase | None:
        """Return the schedule in two phases if the state is one of its states."""
        two_phase = self.two_phase
        if two_phase is None or not two_phase.holds(state, verb, i):
            return None
        return two_phase

    def _begin(self, x: Tensor) -> State:
        if weights_held() or self._enters_late(x) or not self._runs_two_phases(x):
            return (x,)
        return cast(TwoPhase, self.two_phase).begin(x, self._folded(x.device))

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        two_phase = self._schedule_of(state, "read", i)
        if two_phase is not None and not self._has_lost_gradients(two_phase, state, i):
            return two_phase.read(state, i, norm)
        # Else the read is made by itself, of its sources.
        sources = self.settle(state, i)
        if i == 0:
            return apply_norm(norm, sources[0]), sources
        reader = mix_by_weights if weights_held() else self.reader
        return apply_norm(norm, reader(self, sources, i)), sources

    def _has_lost_gradients(self, two_phase: TwoPhase, state: State, i: int) -> bool:
        """Say whether read `i` has a query to teach, and a state that would teach it nothing."""
        if not torch.is_grad_enabled() or self.keys[i] not in self.reads:
            return False
        query = self._parameters_of(i).query
        if query is None or not query.requires_grad:
            return False
        return two_phase.has_lost_gradients(state, i)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        # Asked first, because `to` takes the host 10 us for nothing.
        if y.dtype != state[0].dtype:
            y = y.to(state[0].dtype)
        two_phase = self._schedule_of(state, "write", i)
        if two_phase is not None:
            return two_phase.write(state, i, y)
        if i == 0 and self._enters_late(state[0]) and self._runs_two_phases(state[0]):
            two_phase = cast(TwoPhase, self.two_phase)
            state = two_phase.enter(state[0], self._folded(y.device))
            return two_phase.write(state, 0, y)
        # Inside a block the output joins the running sum, the newest source.
        if i % self.block:
            return (*state[:-1], state[-1] + y)
        # A window that is full lets its oldest source go.
        if self.num_sources(i) == self.num_sources(i + 1):
            state = (state[0], *state[2:])
        return (*state, y)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return cast(Tensor, self._read(state, self.sublayers, norm)[0])

    def _weights(self, state: State, i: int) -> Tensor:
        return self._weights_of(self.settle(state, i), i)[1]

    def folds_norm(self, state: State, i: int) -> bool:
        two_phase = self._schedule_of(state, "read", i)
        return two_phase is not None and not two_phase.plain(state[0])

    def settle(self, state: State, i: int) -> State:
        two_phase = self._schedule_of(state, "read", i)
        return state if two_phase is None else two_phase.settle(state, i)

    def adopt(self, state: State, i: int) -> State:
        two_phase = self.two_phase
        if two_phase is None or i != two_phase.first or not self._runs_two_phases(state[0]):
            return state
        return two_phase.adopt(state, self._folded(state[0].device))

    def one_token(self, stream: Tensor, backend: Backend) -> BlockSources | None:
        # A subclass may read or write otherwise.
        if not self.phased or self.backend == "reference" or type(self) is not AttentionResidual:
            return None
        queries = self.folded_queries(device=stream.device)
        count = self.num_sources(self.sublayers)
        return BlockSources(self.block, self.eps, queries, count, stream, backend)

    def keep_only(self, start: int, stop: int) -> None:
        super().keep_only(start, stop)
        if self.two_phase is not None:
            sizes = self.sublayers, self.block, self.eps
            backend = self.two_phase.backend
            self.two_phase = TwoPhase(*sizes, first=start, stop=stop, backend=backend)
        self.forget_layouts()

    def _enters_late(self, x: Tensor) -> bool:
        """Say whether two phases begin at write 0, since read 0 is the embedding itself.

        To gather the queries takes the host a millisecond, in which a GPU then has the first
        sublayer to run. Gradients are threaded from the start.
        """
        return not (_trains(x) or torch.compiler.is_compiling() or weights_held())

    def _runs_two_phases(self, x: Tensor) -> bool:
        """Say whether reads of a stream that begins as `x` are made in two phases."""
        if self.two_phase is None:
            return False
        if self.schedule == "two-phase":
            return self.backend == "reference" or use_triton("triton", x)
        return use_triton(self.backend, x) or self._trains_on_cpu(x)

    def _trains_on_cpu(self, x: Tensor) -> bool:
        """Say whether two phases over the plain operators beat reads one by one.

        They do on a CPU, in a pass with gradients, for a model that is not tiny. Half precision
        would round between the phases. A compiler fuses each read by itself, and would take two to
        three times as long. Without gradients a prompt would be read faster, and a token by itself
        more slowly.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return False
        if torch.compiler.is_compiling():
            return False
        if not _trains(x) or x.numel() * self.sublayers < WORTH_TWO_PHASES:
            return False
        # Queries are where their layers are: if on another device, the state will go there.
        return all(parameter.device == x.device for parameter in self.reads.parameters())

    def _folded(self, device: torch.device) -> Tensor:
        """Return `folded_queries` of the reads of two phases."""
        two_phase = cast(TwoPhase, self.two_phase)
        return self.folded_queries(two_phase.first, two_phase.last, device)

    def folded_queries(
        self, start: int = 0, stop: int | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Return query times key weight of reads [start, stop), (R, D) on `device` in fp32 (fp64
        for fp64).

        By default these are all reads with the final one; read 0 has one source and a row of zeros.
        Layers may be spread over devices, and then their queries are too. For residuals that can
        run in two phases (`phased`).
        """
        first, stop = max(1, start), self.sublayers + 1 if stop is None else stop
        # Looked up once: an attribute of a module takes the host a microsecond.
        table = self.reads
        keys = self.keys[first:stop]
        reads = [cast(DepthRead, table[key]) for key in keys]
        # A pipeline stage may have the first sublayer alone.
        if not reads:
            return torch.zeros(1, self.dim, device=device)
        folded = _stack([read.scaled_query() for read in reads], device)
        folded = folded.to(accumulation_dtype(folded.dtype))
        if reads[0].key_weight is not None:
            weights = _stack([cast(Tensor, read.key_weight) for read in reads], device)
            folded = folded * weights.to(folded.dtype)
        return torch.nn.functional.pad(folded, (0, 0, first - start, 0))

    def flops_per_token(self) -> int:
        # Of each source its key is normed and scored, and its value joins the sum.
        counts = [self.num_sources(i) for i in range(self.sublayers + 1)]
        sources = sum(count for count in counts if count > 1)
        operations = (4 * self.key_dim + 2 * self.dim) * sources
        if self.query_kind == "projected":
            operations += 2 * self.dim * self.key_dim * len(self.reads)
        return operations + 2 * self.dim * self.sublayers

    def _parameters_of(self, i: int) -> DepthRead:
        return cast(DepthRead, self.reads[self.keys[i]])

    def _weights_of(self, sources: State, i: int) -> tuple[Tensor, Tensor]:
        """Return the sources as one tensor (N, ..., D), in fp32 or wider, and their weights
        (N, ..., H)."""
        # A single source has all the weight.
        if len(sources) == 1:
            stack = stack_wide(sources)
            return stack, stack.new_ones(1, *stack.shape[1:-1], self.heads)
        read = self._parameters_of(i)
        # Scalars are the same for every token.
        if read.scalars is not None:
            stack = stack_wide(sources)
            weights = read.scalars.to(stack.dtype)  # (N, H)
            while weights.dim() < stack.dim():
                weights = weights.unsqueeze(1)
            return stack, weights.expand(*stack.shape[:-1], self.heads)
        query, key_weight = read.scaled_query(), read.key_weight
        if self.query_kind == "projected":
            # The keys' weight multiplies the rows of the projection instead: both are one product.
            rows = None if key_weight is None else key_weight.unsqueeze(-1)
            matrix = fold(query, rows, accumulation_dtype(query.dtype))
            query, key_weight = project_normed(sources[-1], matrix, self.eps), None
        stack = stack_wide(sources)
        return stack, depth_weights(stack, query, key_weight, **self.weighing)


def attend(residual: AttentionResidual, sources: State, i: int) -> Tensor:
    """Read by attention with one static query: kernels where they run."""
    read = residual._parameters_of(i)
    options: dict[str, Any] = {"eps": residual.eps, "backend": residual.backend}
    return depth_attention(sources, read.scaled_query(), read.key_weight, **options)


def mix_by_weights(residual: AttentionResidual, sources: State, i: int) -> Tensor:
    """Read with any options: weights of all sources, then their sum."""
    stack, weights = residual._weights_of(sources, i)
    # The norm of a value is one scalar, so it multiplies the weight.
    if residual.values == "normed":
        weights = weights * rms_scale(stack, residual.eps)
    return mix_sources(stack, hold(weights)).to(sources[0].dtype)


def sum_by_scalars(residual: AttentionResidual, sources: State, i: int) -> Tensor:
    """Read by one learned number per source: a running sum, and no copy of the sources."""
    scalars = cast(Tensor, residual._parameters_of(i).scalars)
    return combine(sources, wide(scalars)[:, 0].split(1))


Reader = Callable[[AttentionResidual, State, int], Tensor]
# The cheapest reader of each query and weights, for one head, normed whole keys and raw values.
READERS: dict[tuple[Query, Weights], Reader] = {
    ("static", "softmax"): attend,
    ("static", "sigmoid"): mix_by_weights,
    ("static", "static"): sum_by_scalars,
    ("projected", "softmax"): mix_by_weights,
    ("projected", "sigmoid"): mix_by_weights,
    ("projected", "static"): sum_by_scalars,
}


def _stack(tensors: list[Tensor], device: torch.device | None) -> Tensor:
    """Stack tensors on the device, or where the first is."""
    device = tensors[0].device if device is None else device
    # The host's time counts: nothing is asked of a tensor that is there already.
    if any(tensor.device != device for tensor in tensors):
        tensors = [tensor.to(device) for tensor in tensors]
    return torch.stack(tensors)


def _trains(x: Tensor) -> bool:
    """Say whether a pass that begins with `x` has gradients, or will be repeated with them.

    Re-entrant checkpointing makes its first pass without gradients, of an embedding that has some,
    and both passes must give states of one layout.
    """
    return torch.is_grad_enabled() or x.requires_grad
