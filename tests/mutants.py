"""Mutants: a file of the package with one small fault, drawn by a seed or written down.

A drawn one changes an operator, a comparison, a number, a condition or an argument of one line, or
drops one statement. Every line of code where this is possible is equally likely.
"""

import ast
import difflib
import itertools
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longest import LONGEST

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
TYPES = ("annotation", "returns", "decorator_list")  # parts of a definition that no test sees


@dataclass(frozen=True)
class Mutant:
    """A file below the root, its text before and after, and the tests that should notice."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def diff(self) -> str:
        lines = difflib.ndiff(self.before.splitlines(), self.after.splitlines())
        return "\n".join(f"    {line}" for line in lines if line[0] in "+-")


def draw(root: Path, under: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants, one a line."""
    sources = {}
    sites = defaultdict(list)
    # A folder, or one file.
    paths = [root / under] if under.endswith(".py") else sorted(root.glob(f"{under}/**/*.py"))
    for path in paths:
        file = path.relative_to(root).as_posix()
        sources[file] = path.read_text(encoding="utf-8")
        for node in nodes(ast.parse(sources[file])):
            for place, new in changes(node):
                sites[file, place.lineno].append((place, new))
    rng = random.Random(seed)
    lines = sorted(sites)
    rng.shuffle(lines)
    mutants = []
    for file, line in lines[:count]:
        text = replaced(sources[file], *rng.choice(sites[file, line]))
        tests = tests_of(root, file)
        mutants.append(Mutant(f"{file}:{line}", file, sources[file], text, tests))
    return mutants


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it, without types, messages of errors and insides of f-strings."""
    yield node
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and name not in TYPES:
                yield from nodes(child)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs of a node and what takes its place."""
    match node:
        case ast.BinOp() | ast.BoolOp() if type(node.op) in OPERATORS:
            yield node, with_fields(node, op=OPERATORS[type(node.op)]())
        case ast.Compare(ops=[operator]):
            yield node, with_fields(node, ops=[OPERATORS[type(operator)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node, node.operand
        case ast.Constant(value=bool()):
            yield node, ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield node, ast.Constant(node.value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension(ifs=[condition]):
            yield condition, ast.UnaryOp(ast.Not(), condition)
        case ast.Call():
            for call in other_calls(node):
                yield node, call
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()


def other_calls(call: ast.Call) -> Iterator[ast.Call]:
    """The call with two neighbouring arguments swapped, or without a named one."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    pairs = 0 if starred else len(call.args) - 1
    for first in range(pairs):
        arguments = list(call.args)
        arguments[first : first + 2] = reversed(arguments[first : first + 2])
        yield with_fields(call, args=arguments)
    for keyword in call.keywords:
        if keyword.arg is not None:
            others = [other for other in call.keywords if other is not keyword]
            yield with_fields(call, keywords=others)


def with_fields(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def replaced(source: str, node: ast.AST, new: ast.AST) -> str:
    """The source with other text where the node stands. Columns of a syntax tree count bytes."""
    encoded = source.encode()
    lengths = [len(line) for line in encoded.splitlines(keepends=True)]
    starts = [0, *itertools.accumulate(lengths)]
    begin = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    text = ast.unparse(new)
    if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
        text = f"({text})"
    return (encoded[:begin] + text.encode() + encoded[end:]).decode()


def tests_of(root: Path, file: str) -> tuple[str, ...]:
    """Test files that name the module, then those of its room, each the quickest first."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    room = ".".join(module.split(".")[:2])
    folder = root / room.replace("headwater", "tests").replace(".", "/")
    if not folder.is_dir():
        folder = root / "tests"  # a room without tests of its own
    ranks = {}
    for path in sorted(root.glob("tests/**/test_*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        beside = module in text or module.rpartition(".")[2] in path.stem.split("_")
        if beside or path.parent == folder:
            place = name.removeprefix("tests/")
            rank = -LONGEST.index(place) if place in LONGEST else -len(LONGEST)
            ranks[name] = (not beside, rank)
    return tuple(sorted(ranks, key=ranks.__getitem__))


def read_faults(root: Path, paths: Sequence[Path]) -> list[Mutant]:
    """Read faults that are written down, as `fault_of` does."""
    mutants = []
    for path in paths:
        for fault in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            mutants.append(fault_of(root, fault))
    return mutants


def fault_of(root: Path, fault: dict[str, Any]) -> Mutant:
    """The mutant of a table [[fault]].

    Raises ValueError for a fault that has lost its place, SyntaxError if it does not compile.
    """
    before = (root / fault["file"]).read_text(encoding="utf-8")
    places = before.count(fault["old"])
    if places != 1:
        raise ValueError(f"{fault['name']}: `old` stands {places} times in {fault['file']}")
    after = before.replace(fault["old"], fault["new"])
    if fault["file"].endswith(".py"):
        compile(after, fault["name"], "exec")
    return Mutant(fault["name"], fault["file"], before, after, tuple(fault["tests"]))
