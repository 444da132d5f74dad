"""Parts of several commands: printing, loading a model of either kind, checking the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.errors import SettingError
from headwater.runs.files import read_json
from headwater.runs.tables import printable
from headwater.train.files import require


def is_transformers(folder: Path) -> bool:
    return (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json")


def load_any(folder: Path, device: str) -> tuple[Any, Any, Callable[[str], list[int]]]:
    """Load the model of a run or of a transformers folder, its tokenizer, and how that encodes."""
    # Whatever the folder holds, its tokenizer turns text into a list of numbers.
    if is_transformers(folder):
        require("transformers", "hf")
        from headwater.hf.formats.folder import load_with_tokenizer

        model: Any
        model, tokenizer = load_with_tokenizer(folder)
        return model.to(device), tokenizer, lambda text: tokenizer(text)["input_ids"]
    from headwater.train import load_run

    loaded = load_run(folder, device)
    return loaded.model, loaded.tokenizer, lambda text: loaded.tokenizer.encode(text).tolist()


def load_opened(folder: Path, device: str) -> tuple[Any, Any, Callable[[str], list[int]]]:
    """Do as `load_any`, and put the residual of a released model behind headwater's verbs."""
    model, tokenizer, encode = load_any(folder, device)
    if is_transformers(folder):
        from headwater.hf.convert.conversion import is_released, open_residual

        if is_released(model):
            open_residual(model)
    return model, tokenizer, encode


def check_device(device: str) -> None:
    import torch

    # torch knows the names of devices, and not whether they are here.
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise SettingError(
            "device", f"must be a device: {str(error).splitlines()[0]}", device
        ) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingError("device", "must be one that torch finds on this machine", device)


def say(text: str, end: str = "\n") -> None:
    print(printable(text), end=end, flush=True)
