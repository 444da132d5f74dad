"""Triton's interpreter replaces the language's functions by its own at every call of a device function, which is nearly
half of its time. Once a launch is enough."""

from collections.abc import Callable
from typing import Any


def patch_once_a_launch() -> None:
    """Seen on Triton 3.6. Where the interpreter has other parts, it stays as it is."""
    from triton.runtime import interpreter

    parts = ("GridExecutor", "_patch_lang", "_LangPatchScope", "tl")
    if not all(hasattr(interpreter, name) for name in parts):
        return
    language: Any = interpreter.tl
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()

    def once(fn: Callable[..., Any]) -> Any:
        seen = [value for value in fn.__globals__.values() if value is language or value is language.core]
        key = (language in seen, language.core in seen)
        if key in patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.add(key)
        return patch(fn)

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
