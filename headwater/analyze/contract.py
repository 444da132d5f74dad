"""Whether a residual keeps what every residual promises, for whoever writes one.

As `torch.library.opcheck` and scikit-learn's `check_estimator` do, every check runs by itself on a small random model,
and what is wrong with one leaves the others their say.
"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwater.analyze.table import start_class
from headwater.models import Decoder, ModelConfig
from headwater.residuals import Norm, Read, Residual, State, Watcher, base, build, entry, mixing, parse, record, watched
from headwater.residuals.record import replay

SHAPE: dict[str, Any] = {"vocab_size": 48, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 48}
DIM, SUBLAYERS = SHAPE["dim"], 2 * SHAPE["layers"]
STARTS = ("exact", "scaled", "different")
# What a class of somebody else's may raise where it is wrong; anything else has nothing to do with what is checked.
RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)


def check_residual(spec: str) -> dict[str, str]:
    """Check what every residual promises; what `headwater residuals --check` calls.

    Arguments: `spec`, a registered name, with options if you like.

    Returns a dictionary: for each check, by name, what is wrong and in which method, or "" where nothing is. A class
    that cannot be built has no other checks.
    Raises ValueError for an unknown name or option.

        assert not any(check_residual("leaky:start=0.5").values())
    """
    parse(spec)
    with torch.random.fork_rng(devices=[]):
        wrong = outcome(methods, spec)
        return {"methods": wrong} if wrong else {"methods": "", **{f.__name__: outcome(f, spec) for f in CHECKS}}


def outcome(check: Callable[[str], str], spec: str) -> str:
    """What a check says, or what was raised on the way and in which method of the class."""
    torch.manual_seed(0)
    try:
        return check(spec)
    except RAISED as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = [frame.f_code for frame in frames if isinstance(frame.f_locals.get("self"), Residual)]
        own = [code.co_name for code in inside if code.co_filename != base.__file__]
        said = " ".join(str(error).partition("\n")[0].split())
        return f"{f'in {own[-1]}: ' if own else ''}{type(error).__name__}: {said}"


def methods(spec: str) -> str:
    """Every method is written, and it can be built."""
    if missing := sorted(entry(spec.partition(":")[0]).build.__abstractmethods__):
        return f"the class lacks {', '.join(missing)}"
    at_start = getattr(build(spec, DIM, SUBLAYERS), "at_start", None)
    return "" if at_start in STARTS else f"at_start must be one of {', '.join(STARTS)}; got {at_start!r}"


@torch.no_grad()
def shapes(spec: str) -> str:
    """Reads are (..., D), and weights (N, ..., H)."""
    residual, (x, *outputs) = scattered(spec).residual, sources()
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        if wrong := misshapen(residual.weights(state, i), i, x):
            return wrong
        read, state = residual.read(state, i)
        for part in inputs(read):
            if part.shape != x.shape:
                return f"_read of sublayer {i} gives {tuple(part.shape)} for a stream of {tuple(x.shape)}"
        state = residual.write(state, i, y)
    if wrong := misshapen(residual.weights(state, SUBLAYERS), SUBLAYERS, x):
        return wrong
    end = residual.end(state)
    return "" if end.shape == x.shape else f"_end gives {tuple(end.shape)} for a stream of {tuple(x.shape)}"


def misshapen(weights: Tensor, i: int, x: Tensor) -> str:
    fits = weights.dim() == x.dim() + 1 and weights.shape[1:-1] == x.shape[:-1]
    return "" if fits else f"_weights of read {i} gives {tuple(weights.shape)}, not (N, ..., H) for {tuple(x.shape)}"


@torch.no_grad()
def states(spec: str) -> str:
    """A state is a value: nothing changes it, and no pass is kept in the residual."""
    residual, one, two = scattered(spec).residual, sources(), sources()
    guard = Guard()
    with watched(residual, guard):
        alone = [inputs(replay(residual, each)[-1])[0] for each in (one, two)]
    if guard.changed:
        return f"{', '.join(guard.changed)} changes in place what it was given: make a new tensor"
    first, second = residual.begin(one[0]), residual.begin(two[0])
    for i in range(SUBLAYERS):
        (_, first), (_, second) = residual.read(first, i), residual.read(second, i)
        first, second = residual.write(first, i, one[i + 1]), residual.write(second, i, two[i + 1])
    same = all(map(torch.equal, (residual.end(first), residual.end(second)), alone))
    return "" if same else "two passes at a time disturb each other: what a pass needs belongs into the state, not self"


def gradients(spec: str) -> str:
    """They reach every parameter of the residual."""
    model, text = scattered(spec), tokens()
    cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    found = {name: p.grad for name, p in model.residual.named_parameters()}
    silent = [name for name, gradient in found.items() if gradient is None or not gradient.any()]
    bad = [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]
    said = f"no gradient reaches {', '.join(silent)}: does _read, _write or _end use it?" if silent else ""
    return f"the gradient of {', '.join(bad)} is not finite" if bad else said


def start(spec: str) -> str:
    """It starts as `at_start` says."""
    found, said = start_class(spec, dim=DIM, sublayers=SUBLAYERS), build(spec, DIM, SUBLAYERS).at_start
    return "" if found == said else f"at_start says {said!r}, and against the plain residual it starts as {found!r}"


@torch.no_grad()
def maps(spec: str) -> str:
    """The mixing matrix gives back the reads, where a source enters them times one number."""
    model = scattered(spec)
    with record(model.residual) as trace:
        model(tokens())
    matrix = mixing(model.residual, trace.sources)
    for i, (row, read) in enumerate(zip(matrix, trace.reads)):
        mixed = torch.einsum("n...,n...d->...d", row, torch.stack(trace.sources))
        if model.residual.scalar_mixing and not torch.allclose(mixed, inputs(read)[0], atol=1e-4, rtol=1e-4):
            cure = "weights that are computed from the state pass through hold; or mixes is 'channel' or 'operator'"
            return f"the mixing matrix does not give back read {i}: {cure}"
    return ""


@torch.no_grad()
def cache(spec: str) -> str:
    """Tokens that come in portions see what they see in a whole pass."""
    model, text = scattered(spec), tokens()
    kept, whole = model.new_cache(), model(text)
    portions = torch.cat([model(part, kept) for part in text.split([5, 1, 1, 5], 1)], 1)
    cure = "a read that looks at other tokens needs token_local = False, resume and past"
    far = (portions - whole).abs().max()
    return "" if far < 1e-3 else f"decoding from a cache differs from a whole pass by {far:.2g}: {cure}"


@torch.no_grad()
def loading(spec: str) -> str:
    """What is saved and loaded computes exactly the same."""
    model, text = scattered(spec), tokens()
    with TemporaryDirectory() as folder:
        model.save(Path(folder))
        far = (Decoder.load(Path(folder))(text) - model(text)).abs().max()
    cure = "what it computes with must be a parameter or a buffer, or follow from __init__'s arguments"
    return "" if far == 0 else f"a saved and loaded model differs by {far:.2g}: {cure}"


@torch.no_grad()
def bf16(spec: str) -> str:
    """Reads stay finite."""
    model = scattered(spec)
    with torch.autocast("cpu", torch.bfloat16), record(model.residual) as trace:
        model(tokens())
    for i, read in enumerate(trace.reads):
        if not all(part.isfinite().all() for part in inputs(read)):
            return f"{'_end' if i == SUBLAYERS else f'_read of sublayer {i}'} is not finite"
    return ""


CHECKS = (shapes, states, gradients, start, maps, cache, loading, bf16)


class Guard(Watcher):
    """Notes which methods change what they are given."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def begin(self, residual: Residual, x: Tensor) -> State:
        return self.compared("_begin", (x,), lambda: super(Guard, self).begin(residual, x))

    def read(self, residual: Residual, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        return self.compared("_read", state, lambda: super(Guard, self).read(residual, state, i, norm))

    def write(self, residual: Residual, state: State, i: int, y: Tensor) -> State:
        return self.compared("_write", (*state, y), lambda: super(Guard, self).write(residual, state, i, y))

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        return self.compared("_end", state, lambda: super(Guard, self).end(residual, state, norm))

    def compared(self, method: str, given: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        before = [tensor.clone() for tensor in given]
        result = call()
        if method not in self.changed and not all(map(torch.equal, before, given)):
            self.changed.append(method)
        return result


def scattered(spec: str) -> Decoder:
    """A small model with every parameter off its start, so that nothing is at a symmetric point."""
    model = Decoder(ModelConfig(**SHAPE, context=16, residual=spec))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.dim() == 1 else 0.5 / p.shape[-1] ** 0.5))
    return model


def sources() -> list[Tensor]:
    return list(torch.randn(SUBLAYERS + 1, 2, 3, DIM))


def tokens() -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 12))


def inputs(read: Read) -> tuple[Tensor, ...]:
    return read if isinstance(read, tuple) else (read,)
