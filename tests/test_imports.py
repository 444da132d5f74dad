"""The arrows between the rooms, and what a bare import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "headwater"

# room -> rooms it may import besides itself. headwater.errors is below all of them.
ARROWS = {
    "ops": set(),
    "residuals": {"ops"},
    "models": {"ops", "residuals"},
    "train": {"ops", "residuals", "models"},
    "hf": {"ops", "residuals"},
    "analyze": {"ops", "residuals", "models"},
}


def imported_rooms(path: Path) -> set[str]:
    """Rooms of headwater that a file imports, relative imports resolved."""
    package = ["headwater", *path.relative_to(PACKAGE).parent.parts]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            modules = [".".join([*stem, alias.name]) for alias in node.names]
        else:
            continue
        rooms |= {m.split(".")[1] for m in modules if m.startswith("headwater.") and m.split(".")[1] in ARROWS}
    return rooms


@pytest.mark.parametrize("room", ARROWS)
def test_rooms_import_only_along_the_arrows(room):
    for path in (PACKAGE / room).rglob("*.py"):
        beyond = imported_rooms(path) - ARROWS[room] - {room}
        assert not beyond, f"{path.relative_to(PACKAGE)} imports {sorted(beyond)}"


def test_the_arrow_test_sees_relative_and_absolute_imports(tmp_path, monkeypatch):
    monkeypatch.setattr("test_imports.PACKAGE", tmp_path)
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.py").write_text("from ..train import loop\nimport headwater.models.config\n")
    assert imported_rooms(tmp_path / "ops" / "bad.py") == {"train", "models"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import headwater", ["torch", "triton", "transformers", "matplotlib"]),
        ("import headwater; headwater.Decoder", ["triton", "transformers", "matplotlib", "tokenizers"]),
        ("import headwater.cli", ["torch"]),
    ],
)
def test_imports_stay_light(statement, unwanted):
    probe = f"import sys; {statement}; print([m for m in {unwanted} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
