"""The experimental residuals of this study, as a plug-in: `--plugin arms` with this folder on PYTHONPATH.

`block-reads` is Block Attention Residuals with the study's hypotheses as options; with none of them it computes
`attnres-block`. It scores a source once for all later reads, as the two phases do, and sums by the kernel of a bank.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.banks import mix_bank, project_source
from headwater.ops.numerics import full_precision
from headwater.residuals import Layout, Norm, Residual, State, register
from headwater.residuals.base import Next, Read, apply_norm, hold, weights_held

BLOCKS = 8
GROWTH = 1.6  # exponent of the borders of growing blocks
Blocks = Literal["even", "growing"]
Inputs = Literal["one", "two", "three"]
Form = Literal["softmax", "difference", "added"]
TokenAt = Literal["newest", "opening"]


def block_starts(sublayers: int, blocks: Blocks) -> tuple[int, ...]:
    """Returns the first sublayer of each block: eight even blocks, or blocks that grow with depth."""
    if blocks == "even":
        size = max(2, -(-sublayers // BLOCKS))
        return tuple(range(0, sublayers, size))
    borders = [round(sublayers * (n / BLOCKS) ** GROWTH) for n in range(BLOCKS)]
    return tuple(sorted(set(borders)))


class DepthReads(nn.Module):
    """The parameters of one sublayer's reads: `ways` inputs over `sources` sources."""

    def __init__(
        self,
        dim: int,
        ways: int,
        sources: int,
        *,
        form: Form,
        key_weight: bool,
        bias: bool,
        token: int,
    ) -> None:
        super().__init__()
        self.ways, self.sources = ways, sources
        rows = {"softmax": ways, "difference": 2 * ways, "added": 0}[form]
        self.query = nn.Parameter(torch.zeros(rows, dim)) if rows else None
        self.key_weight = nn.Parameter(torch.ones(dim)) if rows and key_weight else None
        self.share = nn.Parameter(torch.zeros(ways, 1)) if form == "difference" else None
        logits = rows or ways
        self.bias = nn.Parameter(torch.zeros(logits, sources)) if bias else None
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        if token:
            self.down = nn.Parameter(torch.randn(token, dim) / dim**0.5)
            self.up = nn.Parameter(torch.zeros(logits * sources, token))

    @property
    def rows(self) -> int:
        """How many queries score a source."""
        return 0 if self.query is None else len(self.query)

    def folded(self) -> Tensor:
        """Queries times the weight of the keys, (rows, D)."""
        query = cast(Tensor, self.query)
        return query if self.key_weight is None else query * self.key_weight


@register("block-reads")
class BlockReads(Residual):
    """h_i^c = sum_n w_{i,n}^c v_n for the inputs c of sublayer i, over the embedding, block sums and the running sum.

    `inputs`: one for all of a sublayer; two, where attention's value has one of its own; or three, for query, key and
        value. Each has a query; keys are shared.
    `form` of the weights: softmax of l; difference, softmax(l) - s softmax(l') with a learned s; added, l itself, and
        the sum of all outputs is added, which is then the plain residual at the start.
    l_n = <q, RMSNorm(v_n)> (not for added) + `bias`, a learned number a source + U GELU(V RMSNorm(newest)) of rank
        `token`, 0 for none. `token_at`: newest source, or the newest finished one, which a whole block shares;
        `token_rate`: factor on U, which is a factor on its learning rate.
    `key_weight`: whether keys have a learned weight. `values`: sources raw, or normed with a learned gain a channel.
    `write_norm`: whether outputs are normed, with a learned gain, before they are summed.
    `blocks`: even, or growing with depth.
    """

    at_start = "different"
    mixes = "channel"
    fused = (
        True  # made of kernels, besides numbers a token; compiled by layers, as attnres-block is
    )

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        inputs: Inputs = "one",
        form: Form = "softmax",
        key_weight: bool = True,
        bias: bool = False,
        token: int = 0,
        token_at: TokenAt = "newest",
        token_rate: float = 1.0,
        values: Literal["raw", "normed"] = "raw",
        write_norm: bool = False,
        blocks: Blocks = "even",
        eps: float = 1e-6,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers)
        if form == "added" and not (bias and token):
            raise ValueError("form=added has no queries: its weights are bias=true and token=16")
        self.form, self.eps, self.token_rate = form, eps, token_rate
        if form == "added" and not write_norm:
            self.at_start = "exact"
        elif values == "raw" and not write_norm:
            self.at_start = "scaled"
        self.late = token_at == "newest"
        self.shares_token = token > 0 and not self.late
        self.kinds = tuple(kinds or ("attention", "mlp") * (sublayers // 2))
        self.ways_of_attention = {"one": 1, "two": 2, "three": 3}[inputs]
        self.starts = block_starts(sublayers, blocks)
        self.reads = nn.ModuleDict()
        for i in range(1, sublayers + 1):
            read = DepthReads(
                dim,
                self.ways(i),
                self.num_sources(i),
                form=form,
                key_weight=key_weight,
                bias=bias,
                token=token if self.late or i >= self.starts[1] else 0,
            )
            if not (self.late or self.opens(i)):
                read.down = None
            self.reads[str(i)] = read
        self.gains: nn.ParameterDict | None = None
        if values == "normed":
            self.gains = nn.ParameterDict()
            for i in range(sublayers + 1):
                # Block sums begin about as large as they are without a norm; added weights are zero.
                small = i > 0 and form != "added"
                start = (sublayers / BLOCKS / sublayers) ** 0.5 if small else 1.0
                self.gains[str(i)] = nn.Parameter(torch.full((dim,), start))
        self.write_gains: nn.ParameterDict | None = None
        if write_norm:
            self.write_gains = nn.ParameterDict()
            for i in range(sublayers):
                gain = torch.full((dim,), sublayers**-0.5)
                self.write_gains[str(i)] = nn.Parameter(gain)

    def ways(self, i: int) -> int:
        """The inputs of read `i`."""
        takes_several = 0 < i < self.sublayers and self.kinds[i] == "attention"
        return self.ways_of_attention if takes_several else 1

    def opens(self, i: int) -> bool:
        """Whether what is running before read `i` is finished: the embedding, or a block's sum."""
        return i in self.starts or i == self.sublayers

    def finished(self, i: int) -> int:
        """Finished sources in a state before read `i`, which have been scored."""
        return sum(start < i for start in self.starts)

    def num_sources(self, i: int) -> int:
        """The sources of read `i`."""
        return self.finished(i) + 1

    def layout(self, i: int) -> Layout:
        return self.layouts_at("read", i)[0]

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """Finished sources, their scores for later reads, folded queries, what is running, the token part of a block,
        the sum of all."""
        count = self.finished(i + (verb == "write"))
        names = [f"{kind} {n}" for kind in ("source", "scores") for n in range(count)]
        names.append("queries")
        if verb == "read" or not self.opens(i):
            names.append("running")
        if self._holds_token(verb, i):
            names.append("token")
        if self.form == "added":
            names.append("total")
        return (tuple(names),)

    def _holds_token(self, verb: Next, i: int) -> bool:
        place = i if verb == "write" else i - 1
        return self.shares_token and place >= self.starts[1]

    def _begin(self, x: Tensor) -> State:
        if self.form == "added":
            return (x.new_zeros(0, self.dim), x, x)
        reads = [self._reads(i) for i in range(1, self.sublayers + 1)]
        return (torch.cat([read.folded() for read in reads]), x)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        n = self.finished(i)
        sources, scores, (queries, running, *rest) = state[:n], state[n : 2 * n], state[2 * n :]
        running, logits, hidden = self._score(running, queries, i)
        if self._holds_token("read", i):
            before = rest.pop(0)
            hidden = before if hidden is None else hidden
        if self.late and self.form == "added" and i:
            hidden = self._hidden(rest[0], i)
        value = running if self.gains is None else self._rms_norm(running, self.gains[str(i)])
        x: Read = running
        if i:
            weights = hold(self._weigh((*scores, logits), hidden, i))
            thread = i < self.sublayers
            parts, bank = mix_bank(
                (*sources, value), weights, thread=thread, backend=self._backend()
            )
            sources, value = bank[:-1], bank[-1]
            if self.form == "added":
                parts = tuple(rest[0] + part for part in parts)
            x = self._inputs(parts)
        kept = (hidden,) if self._holds_token("write", i) and i < self.sublayers else ()
        behind = (queries, *kept, *rest)
        if self.opens(i):
            return apply_norm(norm, x), (*sources, value, *scores, logits, *behind)
        running = value if self.gains is None else running  # the newest in its chain of reads
        return apply_norm(norm, x), (*sources, *scores, queries, running, *behind[1:])

    def _write(self, state: State, i: int, y: Tensor) -> State:
        y = y.to(state[0].dtype)
        if self.write_gains is not None:
            y = self._rms_norm(y, self.write_gains[str(i)])
        n = self.finished(i + 1)
        head, rest = state[: 2 * n + 1], list(state[2 * n + 1 :])
        running = y if self.opens(i) else rest.pop(0) + y
        if self.form == "added":
            rest[-1] = rest[-1] + y
        return (*head, running, *rest)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        x, _ = self._read(state, self.sublayers, norm)
        return cast(Tensor, x)

    def _weights(self, state: State, i: int) -> Tensor:
        """Of the first input, without the norms of values."""
        n = self.finished(i)
        scores, (queries, running, *rest) = state[n : 2 * n], state[2 * n :]
        if i == 0:
            return torch.ones(1, *running.shape[:-1], 1, device=running.device)
        _, logits, hidden = self._score(running, queries, i)
        if self._holds_token("read", i) and hidden is None:
            hidden = rest[0]
        if self.late and self.form == "added":
            hidden = self._hidden(rest[0], i)
        weights = self._weigh((*scores, logits), hidden, i)
        return weights[..., 0, :].movedim(-1, 0).unsqueeze(-1).detach()

    def _first_row(self, i: int) -> int:
        """Of read `i` among the rows of all queries."""
        return sum(self._reads(k).rows for k in range(1, i))

    def _score(
        self, running: Tensor, queries: Tensor, i: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is running, again; its scores, for read `i` alone or, where it is finished, for all reads from there;
        and what read `i` makes of it for the token part."""
        read = self._reads(i) if i else None
        first = self._first_row(i)
        stop = len(queries) if self.opens(i) or read is None else first + read.rows
        rows = queries[first:stop]
        down = None if read is None or self.form == "added" else read.down
        if down is not None:
            rows = torch.cat([rows, down])
        if len(rows) == 0:
            return running, running.new_zeros(*running.shape[:-1], 0, dtype=torch.float32), None
        z, running = project_source(running, rows, self.eps, backend=self._backend())
        if down is None:
            return running, z, None
        logits, hidden = z.split([stop - first, len(down)], -1)
        return running, logits, F.gelu(hidden)

    def _hidden(self, total: Tensor, i: int) -> Tensor:
        """Of form=added: the token part comes from the sum of all outputs."""
        down = cast(Tensor, self._reads(i).down)
        z, _ = project_source(total, down, self.eps, backend=self._backend())
        return F.gelu(z)

    def _columns(self, scores: State, i: int) -> list[Tensor]:
        """The scores that read `i` takes of each source: a finished one was scored for all reads from its own on."""
        rows, first = self._reads(i).rows, self._first_row(i)
        columns = []
        for n, score in enumerate(scores):
            begun = self._first_row(self.starts[n]) if n < len(scores) - 1 else first
            columns.append(score[..., first - begun : first - begun + rows])
        return columns

    def _weigh(self, scores: State, token: Tensor | None, i: int) -> Tensor:
        """The weights of read `i`, (..., ways, N) in fp32."""
        read = self._reads(i)
        logits: Tensor | None = None
        with full_precision(scores[-1]):
            if read.rows:
                logits = torch.stack(self._columns(scores, i), -1)
            if read.bias is not None:
                logits = read.bias if logits is None else logits + read.bias
            if read.up is not None and token is not None:
                up = self.token_rate * read.up
                dynamic = F.linear(cast(Tensor, token), up).unflatten(-1, (-1, read.sources))
                logits = dynamic if logits is None else logits + dynamic
        assert logits is not None
        if self.form == "added":
            return logits
        weights = logits.softmax(-1)
        if self.form == "softmax":
            return weights
        plus, minus = weights.chunk(2, -2)
        return plus - cast(Tensor, read.share) * minus

    def _inputs(self, read: Sequence[Tensor]) -> Read:
        if len(read) == 1:
            return read[0]
        return read[0], read[-2], read[-1]  # of two, query and key are the same

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        with full_precision(x):
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)

    def _backend(self) -> Literal["auto", "reference"]:
        return "reference" if weights_held() else "auto"

    def _reads(self, i: int) -> DepthReads:
        return cast(DepthReads, self.reads[str(i)])

    def flops_per_token(self) -> int:
        """Scores of two operations a number and query, sums of two a number, source and input."""
        total = 2 * self.dim * self.sublayers
        for i in range(1, self.sublayers + 1):
            read = self._reads(i)
            total += 2 * self.dim * read.sources * (read.rows + read.ways)
            if read.down is not None and read.up is not None:
                total += 2 * (read.down.numel() + read.up.numel())
        return total
