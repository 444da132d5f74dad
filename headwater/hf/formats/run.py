"""A run of `headwater train` as a transformers model and tokenizer.

The one file of this room that looks at `train`: which files a run consists of, and how those of many ranks become whole
tensors, is known there alone. From there on only data crosses (see export.py). `train` never looks here.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwater.folders import at_home

from .export import export
from .folder import check_out, fast_tokenizer, write_model


def export_run(folder: str | Path, out: str | Path | None = None) -> tuple[PreTrainedModel, Any]:
    """The model of a training run, residual included, as a transformers model, and its tokenizer.

    Arguments:
        folder: a run (its newest checkpoint is taken), one of its checkpoints, or what `headwater export` wrote.
        out: a folder to write both to, which must be new or empty; None writes nothing.

    Returns: a Llama, or a Qwen3 where heads are normed, or headwater's own decoder where it has parts that transformers
    has no counterpart for (`shortswa`, `value_residual`), in eval mode on the CPU; and a fast tokenizer.

    Raises: `headwater.errors.UserError` for a folder that holds no checkpoint, and an `out` that is not empty.

        model, tokenizer = headwater.hf.export_run("runs/train", out="exported")
        print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"))[0]))
    """
    from headwater.train.load import (
        load_run,
    )  # converting a model of transformers' own needs none of it

    out = None if out is None else at_home(out)
    if out is not None:
        check_out(out)
    run = load_run(folder)
    model = export(run.model.config.to_dict(), run.model.weights(), run.tokenizer.end_of_text)
    tokenizer = fast_tokenizer(run.tokenizer.to_json(), run.model.config.context)
    if out is not None:
        write_model(model, tokenizer, out)
    return model, tokenizer
