"""Residuals that other packages bring: modules that the user names, and entry points of packages.

A saved spec says which module registered its residual, `leaky@my_residuals:start=0.9`. That is a
word for the reader, and for messages: nothing is imported because a file names it. Imported is what
the user asks for, and what the user has installed under the entry point group
`headwater.residuals`.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path

from headwater.errors import UserError, as_flag

GROUP = "headwater.residuals"


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register residuals, from the Python path or the current folder.

    Raises UserError for a module that is not found, or that raises: that error is its cause.

        import_plugins(["my_residuals"])
    """
    # The headwater command, unlike python -m, does not look into the current folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        # The module is somebody else's, and may raise anything.
        except Exception as error:
            raise UserError(
                f"{as_flag('plugin', [module])} cannot be imported: {raised_in(module, error)}\n"
                f"A plugin is the name of a module, in {os.getcwd()} or on the Python path; "
                f"python -c 'import {module}' shows where it fails"
            ) from error


def raised_in(module: str, error: Exception) -> str:
    """Say what the import of a module raised, and at which line of its package."""
    place = ""
    # The last frame of the package, whatever that line called.
    for frame, line in traceback.walk_tb(error.__traceback__):
        if top_of(frame.f_globals.get("__name__", "")) == top_of(module):
            place = f"{frame.f_code.co_filename}, line {line}: "
    return f"{place}{type(error).__name__}: {error}"


def top_of(module: str) -> str:
    """Return the package that a module is part of."""
    return module.partition(".")[0]


@lru_cache(maxsize=1)
def load_entry_points() -> None:
    """Import what installed packages register, once.

    It is called when a name is asked for that nobody has registered, or when all names are.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        # As above.
        except Exception as error:
            package = point.dist.name if point.dist else point.module
            raise ValueError(
                f"the entry point '{point.name} = {point.value}' of {GROUP} cannot be imported: "
                f"{raised_in(point.module, error)}\nFix or uninstall the package {package}"
            ) from error


def folder_of(module: str) -> str:
    """Return the folder on the Python path in which an imported module was found.

    Another process has to look there too.
    """
    top = sys.modules[top_of(module)]
    # A package without an __init__.py has no file.
    place = next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__
    return str(Path(place or ".").resolve().parent)


def absence(name: str, module: str) -> str:
    """Say why a residual that a module registered is unknown here, and what to do."""
    if module == "__main__":
        return (
            f"residual '{name}' was defined in a script or notebook: define it there again before "
            "loading"
        )
    return (
        f"residual '{name}' is registered by the module '{module}', which is not imported: add "
        f"{as_flag('plugin', [module])}, or `import {module}` first"
    )
