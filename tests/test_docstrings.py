"""Public functions can be called without reading them: their text has every argument, and what comes back."""

import importlib
import inspect
import re

import pytest

ROOMS = (
    "headwater",
    *(
        f"headwater.{room}"
        for room in ("ops", "residuals", "models", "stages", "train", "hf", "analyze")
    ),
)


def lacking(function) -> list[str]:
    """Arguments that a function's text does not name; and what it returns, if it says nothing of that."""
    text, shape = inspect.getdoc(function) or "", inspect.signature(function)
    missing = [name for name in shape.parameters if not re.search(rf"\b{name}\b", text)]
    returns = shape.return_annotation not in (None, "None")
    if returns and not re.search(r"\breturns?\b", text, re.IGNORECASE):
        missing.append("Returns")
    return missing


@pytest.mark.parametrize("room", ROOMS)
def test_public_functions_say_what_they_take_and_return(room):
    module = importlib.import_module(room)
    functions = {
        name: getattr(module, name)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    found = {name: lacking(function) for name, function in functions.items()}
    assert not {name: words for name, words in found.items() if words}


def test_what_is_lacking_is_found():
    def good(width: int) -> int:
        """Returns twice the width."""
        return 2 * width

    def bad(width: int, eps: float) -> int:
        """Twice the width."""
        return 2 * width

    assert not lacking(good)
    assert lacking(bad) == ["eps", "Returns"]
