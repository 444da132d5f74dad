"""Who may import whom: arrows between rooms, no circles between files, and nothing private from elsewhere.

Each check reads a tree and returns what breaks the rule, so that it can be shown a small tree which does.
"""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "headwater"

# room or file at the top -> those it may import besides itself. A name without a row is an error: say where it stands.
BELOW_ALL = {"errors", "_torch", "evaluation", "folders", "schema"}
ARROWS = {
    **{name: set() for name in BELOW_ALL},
    "folders": {"errors"},
    "schema": {"errors"},
    "ops": set(BELOW_ALL),
    "residuals": {*BELOW_ALL, "ops"},
    "models": {*BELOW_ALL, "ops", "residuals"},
    "generation": {*BELOW_ALL, "ops", "residuals", "models"},
    # A run's settings hold those of its model: models/config.py, which imports no torch.
    "runs": {*BELOW_ALL, "models"},
    # What crosses the cuts of a pipeline, for headwater's own trainer and for other engines.
    "stages": {*BELOW_ALL, "residuals"},
    "train": {*BELOW_ALL, "ops", "residuals", "models", "generation", "runs", "stages"},
    "integrations": {*BELOW_ALL, "residuals", "stages", "hf"},
    "hf": {*BELOW_ALL, "ops", "residuals", "models", "generation"},
    "analyze": {*BELOW_ALL, "ops", "residuals", "models", "runs"},
    "__main__": {"cli"},  # the command line itself, and __init__.py, may import anything
    "doctor": {"ops"},
}

# PyTorch's private parts stand in one file, each with its reason, the versions it was seen on, and a test.
PRIVATE_TORCH = "_torch.py"

# Private names of others for which there is no public way, by the file that uses them.
NO_PUBLIC_WAY = {
    ("hf/formats/folder.py", "_model_mapping"),  # the same, of a folder
    # Of transformers' Auto classes: which class a config stands for
    ("hf/convert/classes.py", "_model_mapping"),
    # What transformers loads in fp32, whatever the dtype of the rest
    ("hf/convert/install.py", "_keep_in_fp32_modules_strict"),
    # transformers' mark on a tensor that has its value already
    ("hf/convert/depth.py", "_is_hf_initialized"),
}


@dataclass(frozen=True)
class Import:
    """`module` is as far as the statement says: with the imported name, whether that is a module or not."""

    file: str
    line: int
    module: str
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def files(package: Path) -> dict[str, ast.Module]:
    """Path below the package -> what is in it."""
    return {
        path.relative_to(package).as_posix(): parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }


parse = functools.cache(ast.parse)  # by the text: many checks read the same files


def statements(
    node: ast.AST, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, those inside functions too, and whether they stand under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, for_types
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(ast.Module(child.body, []), True)
            yield from statements(ast.Module(child.orelse, []), for_types)
        else:
            yield from statements(child, for_types)


def imports(file: str, tree: ast.Module) -> Iterator[Import]:
    """What a file imports, relative imports resolved."""
    here = ["headwater", *Path(file).parent.parts]
    for node, for_types in statements(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            modules = [".".join([*stem, alias.name]) for alias in node.names]
        yield from (Import(file, node.lineno, module, for_types) for module in modules)


def room(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def against_the_arrows(package: Path) -> list[str]:
    found, trees = [], files(package)
    for file, tree in trees.items():
        if room(file) in ("cli", "__init__"):
            continue
        if room(file) not in ARROWS:
            found.append(f"{file} stands in no room of ARROWS")
            continue
        for one in imports(file, tree):
            names = one.module.split(".")
            known = (
                names[0] == "headwater"
                and names[1:2]
                and names[1] in {room(file) for file in trees}
            )
            if known and names[1] not in ARROWS[room(file)] | {room(file)}:
                found.append(str(one))
    return found


def test_rooms_import_only_along_the_arrows():
    found = against_the_arrows(PACKAGE)
    assert not found, "\n".join(found)


def circles(package: Path) -> list[str]:
    """Files that import each other, directly or around some corners; an import inside a function counts.

    One under TYPE_CHECKING does not: it never runs, and a type checker reads files in any order. Nor does that a
    module's package is loaded before it: then every package whose __init__ names what is in it would be a circle.
    """
    trees = files(package)
    homes = {}  # module -> file
    for file in trees:
        parts = ["headwater", *Path(file).with_suffix("").parts]
        homes[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    arrows = {}
    for file, tree in trees.items():
        needed = [one.module for one in imports(file, tree) if not one.for_types]
        found = {homes.get(module, homes.get(module.rpartition(".")[0])) for module in needed}
        arrows[file] = found - {None, file}
    rings = {file: shortest_way_back(arrows, file) for file in arrows}
    return sorted({" -> ".join(turned(ring)) for ring in rings.values() if ring})


def shortest_way_back(arrows: dict[str, set[str]], start: str) -> list[str]:
    ways, seen = [[start]], set()
    for way in ways:  # grows while it is walked through: breadth first
        for further in sorted(arrows[way[-1]]):
            if further == start:
                return way
            if further not in seen:
                seen.add(further)
                ways.append([*way, further])
    return []


def turned(ring: list[str]) -> list[str]:
    """The same circle is written the same way, wherever it was entered."""
    first = ring.index(min(ring))
    return [*ring[first:], *ring[:first], ring[first]]


def test_no_two_files_import_each_other():
    found = circles(PACKAGE)
    assert not found, "\n".join(found)


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def reached(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Of `owner.name`, and of `getattr(owner, "name")`: the owner and the name."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        name = node.args[1]
        if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(
            name, ast.Constant
        ):
            return node.args[0], str(name.value)
    return None


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """torch.ops of `torch.ops`, whatever name `torch` was imported under; else empty."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, known)
        return f"{owner}.{node.attr}" if owner else ""
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def names_of_torch(tree: ast.Module) -> dict[str, str]:
    known = {}
    for node, _ in statements(tree):
        for alias in node.names:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if f"{module}{alias.name}".split(".")[0] == "torch" and not getattr(node, "level", 0):
                # `import torch.nn` binds torch; `import torch.nn as nn` binds nn
                whole = module or alias.asname
                known[alias.asname or alias.name.split(".")[0]] = (
                    f"{module}{alias.name}" if whole else "torch"
                )
    return known


def private_torch(package: Path) -> list[str]:
    found = []
    for file, tree in files(package).items():
        if file == PRIVATE_TORCH:
            continue
        for one in imports(file, tree):
            if one.module.split(".")[0] == "torch" and any(map(private, one.module.split("."))):
                found.append(str(one))
        known = names_of_torch(tree)
        for node in ast.walk(tree):
            owner, name = reached(node) or (None, "")
            if owner and private(name) and dotted(owner, known):
                found.append(f"{file}:{node.lineno} uses {dotted(owner, known)}.{name}")
    return found


def test_private_parts_of_pytorch_stand_in_one_file():
    found = private_torch(PACKAGE)
    assert not found, "\n".join(found)


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines: functions, classes, variables, and attributes of its own objects."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and of_this_object(node.value)
        ):
            own.add(node.attr)
    return own


def of_this_object(owner: ast.expr) -> bool:
    """self, cls and super(): a class may use what its base keeps for its subclasses."""
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def private_parts_of_others(package: Path) -> list[str]:
    """Private names of other files of the package, of objects that come from there, and of other packages' objects."""
    found = []
    for file, tree in files(package).items():
        if file == PRIVATE_TORCH:
            continue
        for one in imports(file, tree):
            *_, owner, name = ["", *one.module.split(".")]
            if one.module.startswith("headwater.") and owner != "headwater" and private(name):
                found.append(str(one))
        own, torch_names = own_names(tree), names_of_torch(tree)
        for node in ast.walk(tree):
            owner, name = reached(node) or (None, "")
            if (
                owner is None
                or not private(name)
                or name in own
                or of_this_object(owner)
                or dotted(owner, torch_names)
            ):
                continue
            if (file, name) not in NO_PUBLIC_WAY:
                found.append(f"{file}:{node.lineno} uses {ast.unparse(owner)}.{name}")
    return found


def test_no_file_uses_the_private_parts_of_another():
    found = private_parts_of_others(PACKAGE)
    assert not found, "\n".join(found)


def unchecked(package: Path) -> list[str]:
    """Imports from modules that mypy is told to skip: it would take them for Any, and check nothing of their use."""
    # What `from transformers import NAME` finds where
    from transformers import _class_to_module as places

    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mypy"][
        "overrides"
    ]
    patterns = {setting["follow_imports"]: setting["module"] for setting in settings}

    def among(module: str, how: str) -> bool:
        return any(
            f"{module}.".startswith(f"{name.removesuffix('.*')}.")
            for name in patterns[how]
            if "*" in name
        ) or (module in patterns[how])

    found = []
    for file, tree in files(package).items():
        for one in imports(file, tree):
            module, _, name = one.module.rpartition(".")
            place = (
                f"transformers.{places[name]}"
                if module == "transformers" and name in places
                else module
            )
            if among(f"{place}.{name}", "skip") and not among(place, "normal"):
                found.append(str(one))
    return found


def test_types_of_what_is_imported_are_known():
    found = unchecked(PACKAGE)
    assert not found, "\n".join(found)


BAD = {  # file -> its text, where each line breaks one rule or none
    "ops/bad.py": "from ..train import loop\nimport headwater.models.config\nfrom ..errors import UserError\n",
    "ops/lazy.py": "def f():\n    from headwater.hf import convert\n",
    "train/loop.py": "from .run import Run\nfrom headwater.analyze import report\n",
    "train/run.py": "def resume():\n    from . import again\n",
    "train/again.py": "from headwater.train.loop import train\n",
    "models/config.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .decoder import Decoder\n",
    "models/decoder.py": "from .config import Config\nclass Decoder:\n    def _split(self): return self._split\n",
    "analyze/report.py": "from headwater.models.decoder import _helper\n\n\nmodel._split(); getattr(model, '_split')\n",
    "residuals/base.py": "from torch.utils._pytree import x\nimport torch.distributed as dist\nfrom torch import nn\n"
    "import torch.fx\na = torch.ops._c10d_functional.wait; b = dist._x.y; c = nn.Module._call_impl\n",
    "residuals/good.py": "import torch\n_x = 1\nclass A(B):\n    def f(self, o): o._x, self._y, super()._z\n",
    "residuals/aliased.py": "import torch\na = torch._C; b = torch.x; c = getattr(torch, '_foreach_norm')\n",
    "_torch.py": "from torch.utils._pytree import x\n",
    "hf/__init__.py": "",
    "new.py": "",
    "errors.py": "",
    "hf/gemma.py": "from transformers import GemmaConfig, LlamaConfig\nimport torch.onnx.errors\n",
    "cli.py": "from headwater.analyze import report\nfrom headwater.train import loop\n",
}


@pytest.fixture
def bad(tmp_path):
    for file, text in BAD.items():
        path = tmp_path / "headwater" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "headwater"


def test_the_arrow_test_sees_relative_absolute_and_lazy_imports(bad):
    assert against_the_arrows(bad) == [
        "new.py stands in no room of ARROWS",
        "ops/bad.py:1 imports headwater.train.loop",
        "ops/bad.py:2 imports headwater.models.config",
        "ops/lazy.py:2 imports headwater.hf.convert",
        "train/loop.py:2 imports headwater.analyze.report",
    ]


def test_the_circle_test_sees_three_files_and_an_import_in_a_function(bad):
    assert circles(bad) == ["train/again.py -> train/loop.py -> train/run.py -> train/again.py"]


def test_the_test_of_private_torch_sees_imports_chains_and_other_names(bad):
    assert private_torch(bad) == [
        "residuals/aliased.py:2 uses torch._C",
        "residuals/aliased.py:2 uses torch._foreach_norm",
        "residuals/base.py:1 imports torch.utils._pytree.x",
        "residuals/base.py:5 uses torch.nn.Module._call_impl",
        "residuals/base.py:5 uses torch.ops._c10d_functional",
        "residuals/base.py:5 uses torch.distributed._x",
    ]


def test_the_test_of_private_parts_sees_imports_and_attributes(bad):
    assert private_parts_of_others(bad) == [
        "analyze/report.py:1 imports headwater.models.decoder._helper",
        "analyze/report.py:4 uses model._split",
        "analyze/report.py:4 uses model._split",
    ]


def test_the_test_of_types_sees_where_names_come_from(bad):
    assert unchecked(bad) == [
        "hf/gemma.py:1 imports transformers.GemmaConfig",
        "hf/gemma.py:2 imports torch.onnx.errors",
    ]


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import headwater", ["torch", "triton", "transformers", "matplotlib"]),
        (
            "import headwater; headwater.Decoder",
            ["triton", "transformers", "matplotlib", "tokenizers"],
        ),
        ("import headwater.cli", ["torch"]),
    ],
)
def test_imports_stay_light(statement, unwanted):
    probe = f"import sys; {statement}; print([m for m in {unwanted} if m in sys.modules])"
    assert answer(probe) == "[]"


def test_a_room_needs_no_import_of_its_own():
    """The guides write `headwater.hf.save_delta` and `headwater.analyze.check_residual` after `import headwater`."""
    # None before one that it imports
    rooms = ("errors", "ops", "residuals", "models", "generation", "hf", "train", "analyze")
    probe = "; ".join(
        f"assert '{room}' not in vars(headwater); print(headwater.{room}.__name__)"
        for room in rooms
    )
    assert answer(f"import headwater; {probe}").split() == [f"headwater.{room}" for room in rooms]


def test_names_that_load_on_first_use_are_listed_before():
    """What a notebook offers after a dot."""
    said = answer(
        "import headwater as h; print(*(name for room in (h, h.train, h.analyze) for name in dir(room)))"
    )
    assert {"build", "convert", "hf", "load_run", "check_residual"} <= set(said.split())
    assert "Decoder" in answer("import headwater; print(dir(headwater.models))")


@pytest.mark.parametrize(
    ("statement", "installs"), [("import headwater", "0"), ("sys.meta_path.append(None)", "1")]
)
def test_importing_installs_nothing_into_the_import_machinery(statement, installs):
    probe = f"import sys; before = [*sys.meta_path, *sys.path_hooks]; {statement}; "
    assert answer(probe + "print(len([*sys.meta_path, *sys.path_hooks]) - len(before))") == installs


def answer(probe: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout.strip()
