"""Check that a residual keeps what every residual promises, for whoever writes one.

As in `torch.library.opcheck` and scikit-learn's `check_estimator`, every check runs by itself on a
small random model, and a failure leaves the other checks their say. Only three end the list when
they fail, since others would blame something else: that the residual can be built, that a pass has
the right shapes, and that a state is a value.
"""

import copy
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules import module

from headwater.analyze.table import start_class
from headwater.models import Decoder, ModelConfig
from headwater.ops import rms_norm
from headwater.residuals import (
    Norm,
    Read,
    Residual,
    State,
    Watcher,
    base,
    build,
    entry,
    mixing,
    parse,
    record,
    watched,
)
from headwater.residuals.record import replay

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "mlp_dim": 48,
}
DIM, SUBLAYERS = SHAPE["dim"], 2 * SHAPE["layers"]
WORDS = {"at_start": ("exact", "scaled", "different"), "mixes": ("scalar", "channel", "operator")}


def check_residual(spec: str) -> dict[str, str]:
    """Check what every residual promises; what `headwater residuals --check` calls.

    Arguments: `spec`, a registered name, with options if you like.

    Returns a dictionary: for each check, by name, what is wrong and in which method, or "" where
    nothing is. A class that cannot be built, or whose pass has not the right shapes or changes a
    state, has no checks after that.
    Raises ValueError for an unknown name or option.

        assert not any(check_residual("leaky:start=0.5").values())
    """
    parse(spec)
    with torch.random.fork_rng(devices=[]):
        outcomes: dict[str, str] = {}
        for check in CHECKS:
            outcomes[check.__name__] = outcome(check, spec)
            if check in NEEDED and outcomes[check.__name__]:
                break
        return outcomes


def outcome(check: Callable[[str], str], spec: str) -> str:
    """The answer of a check, or what was raised on the way and in which method of the class."""
    torch.manual_seed(0)
    try:
        return check(spec)
    except Exception as error:  # the class is somebody else's, and may raise anything
        message = " ".join(str(error).partition("\n")[0].split())
        return f"{place_of(error)}{type(error).__name__}: {message}"


def place_of(error: Exception) -> str:
    """The method of the class in which an error was raised.

    Where none of its methods is on the stack, a method of the interface could not take the result
    of one, and the first such is named.
    """
    # From the outermost frame inwards: the class's methods, and the interface's around them.
    methods, verbs = [], []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not isinstance(frame.f_locals.get("self"), Residual):
            continue
        code = frame.f_code
        if code.co_filename == base.__file__:
            verbs.append(code.co_name)
        elif code.co_filename != module.__file__:
            methods.append(code.co_name)
    if methods:
        return f"in {methods[-1]}: "
    return f"in {verbs[0]}: " if verbs else ""


def methods(spec: str) -> str:
    """Every method is written, and it can be built."""
    if missing := sorted(entry(spec.partition(":")[0]).build.__abstractmethods__):
        return f"the class lacks {', '.join(missing)}"
    residual = build(spec, DIM, SUBLAYERS)
    for name, words in WORDS.items():
        value = getattr(residual, name, None)
        if value not in words:
            return f"{name} must be one of {', '.join(words)}; got {value!r}"
    return ""


@torch.no_grad()
def shapes(spec: str) -> str:
    """Reads are (..., D) as the stream is, and weights (N, ..., H)."""
    residual, (x, *outputs) = scattered(spec).residual, sources()
    state = residual.begin(x)
    if wrong := unlaid(residual, state, "read", 0):
        return f"_begin {wrong}"
    for i, y in enumerate(outputs):
        if wrong := misshapen(residual.weights(state, i), i, x):
            return wrong

        # A read gives one tensor as the stream is, or three, and a state as laid out.
        read, state = residual.read(state, i)
        if wrong := unlaid(residual, state, "write", i):
            return f"_read of sublayer {i} {wrong}"
        parts = inputs(read)
        if len(parts) not in (1, 3):
            count = f"{len(parts)} tensors: one, or three for query, key and value"
            return f"_read of sublayer {i} gives {count}"
        for part in parts:
            if wrong := unlike(part, x):
                return f"_read of sublayer {i} {wrong}"
        state = residual.write(state, i, y)
        if wrong := unlaid(residual, state, "read", i + 1):
            return f"_write of sublayer {i} {wrong}"
    if wrong := misshapen(residual.weights(state, SUBLAYERS), SUBLAYERS, x):
        return wrong
    wrong = unlike(residual.end(state), x)
    return wrong and f"_end {wrong}"


def unlaid(residual: Residual, state: State, verb: base.Next, i: int) -> str:
    layouts = residual.layouts[verb, i]
    if len(state) in map(len, layouts):
        return ""
    names = " or ".join(map(str, layouts))
    return f"gives a state of {len(state)} tensors, and layout({i}) names {names}"


def unlike(read: Tensor, x: Tensor) -> str:
    if not isinstance(read, Tensor):
        return f"gives a {type(read).__name__}, not a tensor"
    if read.shape != x.shape or read.dtype != x.dtype:
        stream = f"{tuple(x.shape)} of {x.dtype}"
        return f"gives {tuple(read.shape)} of {read.dtype} for a stream of {stream}"
    return "" if read.isfinite().all() else "is not finite"


def misshapen(weights: Tensor, i: int, x: Tensor) -> str:
    tokens = x.shape[:-1]
    if weights.dim() == len(tokens) + 2 and weights.shape[1:-1] == tokens:
        return ""
    shape = tuple(weights.shape)
    return f"_weights of read {i} gives {shape}, not (N, ..., H) for {tuple(x.shape)}"


@torch.no_grad()
def norms(spec: str) -> str:
    """Reads apply the norm that they are given."""
    residual, (x, *outputs) = scattered(spec).residual, sources()
    weight, state = 1 + torch.rand(DIM), residual.begin(x)
    cure = "it ends with apply_norm(norm, ...), since no caller norms a read"

    def norm(read: Tensor) -> Tensor:
        return rms_norm(read, weight, 1e-6)

    def same(normed: Read, plain: Read) -> bool:
        close = functools.partial(torch.allclose, atol=1e-4, rtol=1e-4, equal_nan=True)
        return all(map(close, inputs(normed), map(norm, inputs(plain))))

    for i, y in enumerate(outputs):
        plain, after = residual.read(state, i)
        if not same(residual.read(state, i, norm)[0], plain):
            return f"_read of sublayer {i} does not apply the norm that it is given: {cure}"
        state = residual.write(after, i, y)
    fits = same(residual.end(state, norm), residual.end(state))
    return "" if fits else f"_end does not apply the norm that it is given: {cure}"


@torch.no_grad()
def states(spec: str) -> str:
    """A state is a value: nothing changes it, and no pass is kept in the residual."""
    residual, one, two = scattered(spec).residual, sources(), sources()

    # Each pass by itself, and one of them again.
    guard = Guard()
    with watched(residual, guard):
        alone = [flat(replay(residual, one)), flat(replay(residual, two))]
    if guard.changed:
        return f"{', '.join(guard.changed)} changes in place what it was given: make a new tensor"
    if not equal(flat(replay(residual, two)), alone[1]):
        rule = "reads follow only from the state and parameters"
        return f"the same pass gives something else the second time: {rule}"

    # Both passes at a time, step by step.
    first, second = residual.begin(one[0]), residual.begin(two[0])
    reads: list[tuple[Read, Read]] = []  # of both passes
    for i in range(SUBLAYERS):
        a, first = residual.read(first, i)
        b, second = residual.read(second, i)
        reads.append((a, b))
        first = residual.write(first, i, one[i + 1])
        second = residual.write(second, i, two[i + 1])
    reads.append((residual.end(first), residual.end(second)))
    if not all(map(equal, map(flat, zip(*reads)), alone)):
        return "two passes at a time disturb each other: what a pass needs belongs into the state, not self"

    # A first pass may work out something once and keep it, such as a layout; a later one may not.
    before = attributes(residual)
    replay(residual, sources())
    changed = [name for name, now in attributes(residual).items() if before.get(name) is not now]
    if not changed:
        return ""
    return f"a pass sets {', '.join(changed)} of self: what a pass needs belongs into the state"


def attributes(residual: Residual) -> dict[str, Any]:
    """The attributes of its modules, by path."""
    values = {}
    for path, part in residual.named_modules():
        for name, value in vars(part).items():
            values[f"{path}.{name}".lstrip(".")] = value
    return values


def gradients(spec: str) -> str:
    """They reach every parameter of the residual."""
    model, text = scattered(spec), tokens()
    logits = model(text)[:, :-1].flatten(0, 1)
    cross_entropy(logits, text[:, 1:].flatten()).backward()
    # Both mistakes are sought in one pass; a gradient that is not finite explains more.
    silent, infinite = [], []
    for name, parameter in model.residual.named_parameters():
        gradient = parameter.grad
        if gradient is None or not gradient.any():
            silent.append(name)
        elif not gradient.isfinite().all():
            infinite.append(name)
    if infinite:
        return f"the gradient of {', '.join(infinite)} is not finite"
    if silent:
        return f"no gradient reaches {', '.join(silent)}: does _read, _write or _end use it?"
    return ""


def start(spec: str) -> str:
    """It starts as `at_start` says."""
    promise = build(spec, DIM, SUBLAYERS).at_start
    measured = start_class(spec, dim=DIM, sublayers=SUBLAYERS)
    if measured == promise:
        return ""
    return f"at_start says {promise!r}, and against the plain residual it starts as {measured!r}"


@torch.no_grad()
def maps(spec: str) -> str:
    """The mixing matrix gives back the reads, where a source enters them times one number."""
    model = scattered(spec)
    with record(model.residual) as trace:
        model(tokens())
    matrix = mixing(model.residual, trace.sources)
    if not model.residual.scalar_mixing:
        return ""
    stack = torch.stack(trace.sources)
    for i, (row, read) in enumerate(zip(matrix, trace.reads)):
        mixed = torch.einsum("n...,n...d->...d", row, stack)
        if not torch.allclose(mixed, inputs(read)[0], atol=1e-4, rtol=1e-4):
            cure = "weights that are computed from the state pass through hold"
            cure += "; or mixes is 'channel' or 'operator'"
            return f"the mixing matrix does not give back read {i}: {cure}"
    return ""


@torch.no_grad()
def cache(spec: str) -> str:
    """Tokens that come in portions see what they see in a whole pass."""
    model, text = scattered(spec), tokens()
    # Portions of several tokens and of one, as prompts and decoding have them.
    cache, whole = model.new_cache(len(text)), model(text)
    portions = [model(portion, cache) for portion in text.split([5, 1, 1, 5], 1)]
    distance = (torch.cat(portions, 1) - whole).abs().max()
    if distance < 1e-3:
        return ""
    cure = "a read that looks at other tokens needs token_local = False, resume and past"
    return f"decoding from a cache differs from a whole pass by {distance:.2g}: {cure}"


@torch.no_grad()
def loading(spec: str) -> str:
    """A saved and loaded model computes exactly the same."""
    model, text = scattered(spec), tokens()
    # Through a real folder: what is not saved is built anew from the configuration.
    with TemporaryDirectory() as folder:
        model.save(Path(folder))
        loaded = Decoder.load(Path(folder)).eval()
    distance = (loaded(text) - model(text)).abs().max()
    if distance == 0:
        return ""
    cure = "a parameter or a buffer, or follow from __init__'s arguments"
    return (
        f"a saved and loaded model differs by {distance:.2g}: what it computes with must be {cure}"
    )


@torch.no_grad()
def stages(spec: str) -> str:
    """A network that is cut in two, as a pipeline does, computes the same."""
    residual, (x, *outputs) = scattered(spec).residual, sources()
    cuts = [i for i in range(SUBLAYERS // 2, SUBLAYERS) if residual.may_cut(i)]
    if not cuts:
        return ""
    cut = cuts[0]

    # Each stage keeps the parameters of its sublayers.
    first, last = copy.deepcopy(residual), copy.deepcopy(residual)
    first.keep_only(0, cut)
    last.keep_only(cut, SUBLAYERS)
    cure = "parameters of sublayer i stand in a dict under str(i), those of the end under "
    cure += "str(sublayers)"
    both = {*dict(first.named_parameters())} & {*dict(last.named_parameters())}
    if both:
        cure += "; or may_cut says where none is cut"
        return f"both stages of a pipeline keep {', '.join(sorted(both))}: {cure}"

    # The state goes from one stage to the other.
    state = first.begin(x)
    for i, y in enumerate(outputs):
        if i == cut:
            state = last.adopt(tuple(first.settle(state, i)), i)
        stage = first if i < cut else last
        state = stage.write(stage.read(state, i)[1], i, y)
    whole = inputs(replay(residual, [x, *outputs])[-1])[0]
    distance = (last.end(state) - whole).abs().max()
    if distance < 1e-3:
        return ""
    return f"cut before sublayer {cut}, as a pipeline does, it ends {distance:.2g} away: {cure}"


@torch.no_grad()
def device(spec: str) -> str:
    """It moves with its model, here to the device on which pipelines trace shapes."""
    scattered(spec).to("meta")(tokens().to("meta"))
    return ""


@torch.no_grad()
def bf16(spec: str) -> str:
    """Reads stay finite."""
    model = scattered(spec)
    with torch.autocast("cpu", torch.bfloat16), record(model.residual) as trace:
        model(tokens())
    for i, read in enumerate(trace.reads):
        if not all(part.isfinite().all() for part in inputs(read)):
            method = "_end" if i == SUBLAYERS else f"_read of sublayer {i}"
            return f"{method} is not finite"
    return ""


NEEDED = (methods, shapes, states)  # by those that follow, which would blame something else
CHECKS = (
    methods,
    shapes,
    norms,
    states,
    gradients,
    start,
    maps,
    cache,
    loading,
    stages,
    device,
    bf16,
)


class Guard(Watcher):
    """Notes the methods that change their arguments in place."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def begin(self, residual: Residual, x: Tensor) -> State:
        with self.compared("_begin", (x,)):
            return super().begin(residual, x)

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        with self.compared("_read", state):
            return super().read(residual, state, i, norm)

    def write(self, residual: Residual, state: State, i: int, y: Tensor) -> State:
        with self.compared("_write", (*state, y)):
            return super().write(residual, state, i, y)

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        with self.compared("_end", state):
            return super().end(residual, state, norm)

    @contextmanager
    def compared(self, method: str, arguments: Sequence[Tensor]) -> Iterator[None]:
        before = [tensor.clone() for tensor in arguments]
        yield
        if method not in self.changed and not equal(before, arguments):
            self.changed.append(method)


def scattered(spec: str) -> Decoder:
    """Make a small model without dropout, every parameter off its start, where all is symmetric.

    Its norms have a large eps, which lets a factor on a read through.
    """
    config = ModelConfig(**SHAPE, context=16, norm_eps=0.1, residual=spec)
    model = Decoder(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            scale = 0.2 if p.dim() < 2 else 0.5 / p.shape[-1] ** 0.5
            p.add_(torch.randn_like(p) * scale)
    return model


def sources() -> list[Tensor]:
    return list(torch.randn(SUBLAYERS + 1, 3, 2, DIM))


def tokens() -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 12))


def inputs(read: Read) -> tuple[Tensor, ...]:
    return read if isinstance(read, tuple) else (read,)


def flat(reads: Sequence[Read]) -> list[Tensor]:
    return [part for read in reads for part in inputs(read)]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """To the bit, where NaN is NaN."""
    pairs = zip(map(torch.nan_to_num, some), map(torch.nan_to_num, others))
    return all(torch.equal(a, b) for a, b in pairs)
