"""A page for each room of the package with every name that it exports. Read from the text of the code, so that nothing
has to be installed for it; what the code says of each name is set by mkdocstrings."""

from pathlib import Path
from typing import Any

import griffe

from headwater.residuals import entry, names

ROOT = Path(__file__).parents[2]
ROOMS = {
    "residuals": "How depth is connected: build a residual, register one, record what it does.",
    "models": "The decoder that comes with the package, and text from it.",
    "train": "Training, comparing, and reading runs back.",
    "hf": "Hugging Face: convert, verify, save, load.",
    "analyze": "Looking at a model without changing it.",
}
OPERATORS = (
    "Pure tensor functions. Each has a reference in fp32 and, where it says so, kernels with the "
    "same signature."
)
FIRST = (
    "train",
    "compare",
    "study",
    "load_run",
    "build",
    "convert",
    "verify",
    "inspect",
)  # in order of use
INTERFACE = ("begin", "read", "write", "end", "weights", "layout", "resume", "past")
MORE = {  # public, though the room does not export them by itself
    "residuals": ["headwater.residuals.parameter_groups.param_groups"],
    "models": [
        "headwater.generation.generate.generate",
        "headwater.generation.text_pieces.continue_texts",
        "headwater.generation.sampling.Sampling",
    ],
    "analyze": [
        "headwater.analyze.inspector.look.inspect",
        "headwater.analyze.inspector.inspection.Inspection",
        "headwater.analyze.inspector.forward_pass.ForwardPass",
    ],
}


def pages() -> dict[str, str]:
    package = griffe.load("headwater", search_paths=[ROOT])
    rooms = {
        f"reference/python/{room}.md": page(package, room, about) for room, about in ROOMS.items()
    }
    return {
        **rooms,
        "reference/operators.md": page(package, "ops", OPERATORS).replace(
            "headwater.ops", "Operators", 1
        ),
    }


def page(package: Any, room: str, about: str) -> str:
    parts = [f"# headwater.{room}\n\n{about}"]
    paths = [*MORE.get(room, []), *exported(package, room)]
    first = [path for name in FIRST for path in paths if path.rpartition(".")[2] == name]
    paths = [*first, *(path for path in paths if path not in first)]
    listed = [f"[`{path.rpartition('.')[2]}`][{path}]" for path in paths]
    parts.append(" · ".join(listed))
    if room == "residuals":
        parts.append("Each registered residual has [a page of its own](../residuals/index.md).")
    return "\n\n".join([*parts, *(directive(path) for path in paths)]) + "\n"


def exported(package: Any, room: str) -> list[str]:
    """Paths of functions, then of classes that say something; registered residuals have pages of their own."""
    module = package[room]
    own = {
        f"{cls.__module__}.{cls.__qualname__}" for cls in (entry(name).build for name in names())
    }
    paths = [module.imports.get(str(name)) for name in module.exports]
    found = [
        (path, package[path.removeprefix("headwater.")])
        for path in paths
        if path and path not in own
    ]
    kinds = (
        [path for path, thing in found if getattr(thing, kind)]
        for kind in ("is_function", "is_class")
    )
    return [path for group in kinds for path in group]


def directive(path: str) -> str:
    members = (
        "".join(f"\n          - {member}" for member in INTERFACE)
        if path.endswith(".base.Residual")
        else ""
    )
    return f"::: {path}" + (f"\n    options:\n      members:{members}" if members else "")
