"""The table of residuals, measured from the code: formula, parameters, memory, traffic, start.

Traffic counts passes over one (tokens x D) tensor in a read and a write of a sublayer, forward,
parameters not counted. `least` is what two perfectly fused kernels would move, sublayer by
sublayer: each state tensor touched, once, and each new one. `eager` is what the operators move when
each runs by itself. `paper` is what table 1 of Attention Residuals (arXiv 2603.15031) counts for
the same network: its two phases, where a block's queries read finished sources once, and
hyper-connections whose five steps each run by themselves.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from headwater._torch import TorchDispatchMode, tree_leaves
from headwater.ops import rms_norm
from headwater.residuals import (
    AttentionResidual,
    Residual,
    StandardResidual,
    State,
    build,
    entry,
    names,
    options_of,
)
from headwater.residuals.streams import StreamsResidual
from headwater.residuals.two_phase import FULL_SPAN
from headwater.runs import tables

TOKENS = 16
COLUMNS = ("residual", "parameters", "stored", "fused", "eager", "paper", "at start")
COUNTS = (
    "traffic: passes over (tokens x D) of one sublayer's read and write. fused: the least for one kernel a read and "
    "one a write; eager: operator by operator; paper: by table 1 of arXiv 2603.15031, in two phases, mHC unfused.\n"
    "at start: exact is the plain residual; scaled is it up to a factor, which the reader's norm cancels; different."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    formula: str
    parameters: float  # per sublayer, in units of D
    stored: float  # the largest state, in units of D a token
    least: float  # traffic per sublayer, in units of D a token
    eager: float
    paper: float | None  # None: the paper has no formula for it
    at_start: str
    mixes: str


def residual_table(
    specs: Iterable[str] | None = None, *, dim: int = 128, layers: int = 12
) -> list[Row]:
    """Measure what each residual costs: parameters, stored activations, traffic, start.

    Arguments: `specs`, names with options, all registered ones by default; `dim` and `layers` of
    the decoder.

    Returns a `Row` for each. Raises ValueError for an unknown name or option.
    """
    if specs is None:
        specs = names()
    return [_row(spec, dim, 2 * layers) for spec in specs]


def print_table(rows: Sequence[Row]) -> None:
    """Print the table, and each formula on a line of its own, so that no column is cut."""
    console = Console(highlight=False)
    lines = [[row.name, *_numbers(row), row.at_start] for row in rows]
    title = "in units of the width D, per sublayer (stored: in all)"
    tables.print_table(tables.Table(COLUMNS, lines, title=title, caption=COUNTS), console)
    for row in rows:
        console.print(f"[bold]{escape(row.name)}[/]  {escape(row.formula)}", soft_wrap=True)


def print_options(specs: Iterable[str]) -> None:
    """Print what each residual says of itself, and its options with their values and defaults."""
    console = Console(highlight=False)
    for name in dict.fromkeys(spec.partition(":")[0] for spec in specs):
        cls, options = options_of(name)
        console.print(f"\n[bold]{name}[/]: {escape(_paragraphs(cls))}", soft_wrap=True)
        for option in options:
            words = ": ".join(filter(None, (option.takes, option.meaning)))
            console.print(
                f"  {option.name}={option.default}  {words}", markup=False, soft_wrap=True
            )
        if not options:
            console.print("  no options")


def _paragraphs(cls: type[Residual]) -> str:
    """A docstring after its first line, its indentation taken away."""
    docstring = inspect.cleandoc(cls.__doc__ or "")
    return docstring.partition("\n")[2].strip()


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table of Markdown, with the formula in its second column."""
    head = ["residual", "formula", "parameters / D", "stored / D", "traffic / D, fused"]
    lines = [[f"`{r.name}`", f"`{r.formula}`", *_numbers(r), r.at_start] for r in rows]
    return tables.markdown(tables.Table([*head, "eager", "paper", "at start"], lines))


def _numbers(row: Row) -> list[str]:
    values = (row.parameters, row.stored, row.least, row.eager, row.paper)
    return ["-" if value is None else f"{value:.3g}" for value in values]


def _row(spec: str, dim: int, sublayers: int) -> Row:
    torch.manual_seed(0)
    residual = build(spec, dim, sublayers)
    stored, least, eager = _traffic(residual)
    return Row(
        name=spec,
        formula=entry(spec.partition(":")[0]).formula,
        parameters=sum(p.numel() for p in residual.parameters()) / sublayers / dim,
        stored=stored,
        least=least / sublayers,
        eager=eager / sublayers,
        paper=paper_traffic(residual),
        at_start=start_class(spec, sublayers=sublayers),
        mixes=residual.mixes,
    )


def paper_traffic(residual: Residual) -> float | None:
    """The traffic of a sublayer by table 1 of arXiv 2603.15031, in units of D per token.

    None where the paper has no formula.

    For L sublayers in N blocks of S: standard 3, Block N / S + 5, Full (read in spans of S) S + N.
    For m streams 8 m + 2, and 2 m m + 4 m numbers besides. At L = 128, S = 16 and m = 4: 3, 5.5, 24
    and 34.
    """
    if isinstance(residual, StandardResidual):
        return 3.0
    if isinstance(residual, StreamsResidual):
        m = residual.streams
        return 8 * m + 2 + (2 * m * m + 4 * m) / residual.dim
    if not isinstance(residual, AttentionResidual) or not residual.phased:
        return None
    span = FULL_SPAN if residual.block == 1 else residual.block
    blocks = residual.sublayers / span
    return span + blocks if residual.block == 1 else blocks / span + 5


class _Ledger(TorchDispatchMode):
    """Adds up the elements that operators read and write, without views and parameters."""

    def __init__(self, constant: set[int]) -> None:
        super().__init__()
        self.constant = constant  # storages of parameters
        self.touched: set[int] = set()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Each operator by itself reads its inputs and writes its results.
        inputs, results = _tensors((args, kwargs)), _tensors(out)
        # A view moves nothing.
        if {_storage(t) for t in results} & {_storage(t) for t in inputs}:
            return out
        for tensor in (*inputs, *results):
            if _storage(tensor) not in self.constant:
                self.elements += _distinct(tensor)
        self.touched |= {_storage(t) for t in inputs}
        return out


@torch.no_grad()
def _traffic(residual: Residual) -> tuple[float, float, float]:
    """Return the largest state, fused and eager traffic of a pass, in (tokens x D) tensors."""
    unit = TOKENS * residual.dim
    sources = torch.randn(residual.sublayers + 1, 1, TOKENS, residual.dim)
    state = residual.begin(sources[0].clone())
    stored = least = eager = 0
    constant = {_storage(p) for p in residual.parameters()}

    def measure(call: Callable[..., Any], state: State, *rest: Any) -> Any:
        nonlocal stored, least, eager
        # A fused kernel touches each storage of the state once, and writes each new one.
        before = {_storage(t): _stored(t) for t in _tensors((state, rest))}
        with _Ledger(constant) as ledger:
            result = call(state, *rest)
        after = {_storage(t): _stored(t) for t in _tensors(result)}
        least += sum(size for storage, size in before.items() if storage in ledger.touched)
        least += sum(size for storage, size in after.items() if storage not in before)
        eager += ledger.elements
        return result

    # One pass, sublayer by sublayer; outputs are copies, as no sublayer returns its input.
    for i, source in enumerate(sources[1:]):
        _, state = measure(residual.read, state, i)
        stored = max(stored, _size(state))
        state = measure(residual.write, state, i, source.clone())
        stored = max(stored, _size(state))
    return stored / unit, least / unit, eager / unit


def start_class(spec: str, *, dim: int = 16, sublayers: int = 8) -> str:
    """Compare the reads with those of the plain residual, with the same random sublayers.

    Returns "exact", "scaled" (equal once normed) or "different".
    """
    # A factor that the reader's norm cancels is no other start.
    plain, other = _reads("standard", dim, sublayers), _reads(spec, dim, sublayers)
    if torch.allclose(other, plain, atol=1e-9, rtol=0):
        return "exact"
    normed, plain_normed = rms_norm(other, None, 0.0), rms_norm(plain, None, 0.0)
    same = torch.allclose(normed, plain_normed, atol=1e-6, rtol=0)
    return "scaled" if same else "different"


@torch.no_grad()
def _reads(spec: str, dim: int, sublayers: int) -> Tensor:
    # The same stream and sublayers for every residual, in fp64.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64)
    maps = torch.randn(sublayers, 2, dim, dim, generator=generator, dtype=torch.float64)
    maps /= dim**0.5
    torch.manual_seed(1)
    residual = build(spec, dim, sublayers).double().eval()
    state, reads = residual.begin(x), []
    for i, (inner, outer) in enumerate(maps):
        read, state = residual.read(state, i)
        reads.append(torch.stack(read).mean(0) if isinstance(read, tuple) else read)
        hidden = rms_norm(reads[-1], None, 1e-30) @ inner
        state = residual.write(state, i, hidden.tanh() @ outer)
    return torch.stack([*reads, residual.end(state)])


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in nested tuples and states, which torch's tree functions do not open."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _stored(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _distinct(tensor: Tensor) -> int:
    """Elements behind a tensor, a broadcast axis counted once."""
    return math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )


def _size(state: Iterable[Tensor]) -> int:
    return sum({_storage(t): _stored(t) for t in state}.values())
