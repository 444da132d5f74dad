"""A package outside of the repository that brings the residual of docs/guides/new-residual.md, written to a folder."""

import sys
from contextlib import contextmanager
from pathlib import Path

from headwater.residuals import plugins, registry

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "new-residual.md"
LEAKY = (
    PAGE.read_text(encoding="utf-8")
    .partition("```python\n# my_residuals.py\n")[2]
    .partition("```")[0]
)


def write_package(folder: Path) -> Path:
    """`brook`, whose residual `leaky` is registered by its module brook.leaky; `import brook` is enough."""
    package = folder / "site" / "brook"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import leaky\n")
    (package / "leaky.py").write_text(LEAKY)
    return package.parent


def install(site: Path, value: str = "brook") -> None:
    """What pip writes of a package with an entry point."""
    about = site / "brook-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brook\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[headwater.residuals]\nbrook = {value}\n")


@contextmanager
def without_plugins():
    """Inside, as in a new process: nothing but headwater's own residuals is known; afterwards as before."""
    before, modules = dict(registry._entries), set(sys.modules)
    plugins.load_entry_points.cache_clear()
    try:
        yield
    finally:
        registry._entries.clear()
        registry._entries.update(before)
        for module in set(sys.modules) - modules:
            if module.partition(".")[0] == "brook":
                del sys.modules[module]
        plugins.load_entry_points.cache_clear()
