"""Residuals that other packages bring: modules named by the user, and the entry points of what is installed.

A saved spec says which module registered its residual, `leaky@my_residuals:start=0.9`. It is a word for the reader, and
for messages: nothing is imported because a file names it. What is imported is what the user asks for (`--plugin`,
`import`), and what the user has installed under the entry point group `headwater.residuals`.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path

from headwater.errors import UserError

GROUP = "headwater.residuals"


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register residuals, from the Python path or the current folder.

    Raises UserError for what is no module's name, one that is not found, or one that raises: that error is its cause.

        import_plugins(["my_residuals"])
    """
    for module in modules:
        if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
            raise UserError(
                f"--plugin takes the name of a module, as in `import my_residuals`; got {module!r}"
            )
        if os.getcwd() not in sys.path:
            sys.path.append(
                os.getcwd()
            )  # the headwater command, unlike python -m, does not look there
        try:
            importlib.import_module(module)
        except (
            Exception
        ) as error:  # a module of somebody else's: whatever it raises is what there is to say
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is not None and f"{module}.".startswith(f"{absent}."):
                raise UserError(
                    f"--plugin {module}: there is no module '{absent}' in {os.getcwd()} or on the Python path: "
                    "run the command where it lies, set PYTHONPATH to its folder, or install it"
                ) from None
            raise UserError(
                f"--plugin {module} cannot be imported: {raised_in(module, error)}\n"
                f"Mend the module; python -c 'import {module}' shows all that led there"
            ) from error


def raised_in(module: str, error: Exception) -> str:
    """What the import of a module raised, and where: at the last line of its package, whatever that line called."""
    package, said = module.partition(".")[0], str(error)
    frames = [
        (at.f_globals.get("__name__", ""), at.f_code, line)
        for at, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [
        f"{code.co_filename}, line {line}: "
        for name, code, line in frames
        if name.partition(".")[0] == package
    ]
    if isinstance(error, SyntaxError) and error.filename:  # of a file that never ran
        own, said = [f"{error.filename}, line {error.lineno}: "], error.msg
    return "".join(own[-1:]) + f"{type(error).__name__}: {said}"


def flags_for(modules: Iterable[str | None]) -> str:
    """The end of a command that imports these again. None is headwater itself; a script has no name to import."""
    return "".join(
        f" --plugin {module}" for module in sorted({*modules} - {None, "__main__"}, key=str)
    )


@lru_cache(maxsize=1)
def load_entry_points() -> None:
    """Import what installed packages register; once, when a name is asked for that nobody knows, or all names are."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # as above
            raise ValueError(
                f"the entry point '{point.name} = {point.value}' of {GROUP} cannot be imported: "
                f"{raised_in(point.module, error)}\n"
                f"Mend or uninstall the package{'' if point.dist is None else f' {point.dist.name}'}"
            ) from error


def is_own(module: str) -> bool:
    """Whether a module is part of headwater, which needs no import to be named."""
    return module.partition(".")[0] == "headwater"


def folder_of(module: str) -> str:
    """The folder on the Python path that an imported module was found in: another process has to look there too."""
    top = sys.modules[module.partition(".")[0]]
    place = Path(next(iter(top.__path__)) if hasattr(top, "__path__") else top.__file__ or ".")
    return str(place.resolve().parent)


def absence(name: str, module: str) -> str:
    """Why a residual that a module is said to register is not known, and what to do."""
    said = f"residual '{name}' is registered by the module '{module}'"
    if module == "__main__":
        return f"residual '{name}' was defined in a script or notebook: define it there again before loading"
    if module in sys.modules:
        return f"{said} where it was saved, but the '{module}' that is imported here registers none of that name"
    return f"{said}, which is not imported: add --plugin {module}, or `import {module}` first"
