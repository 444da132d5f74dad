"""A run of `headwater train` as a transformers model and tokenizer."""

from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from headwater.folders import at_home
from headwater.models import Decoder

from .export import export
from .folder import check_out, fast_tokenizer, write_model


class Run(Protocol):
    """A trained decoder with its tokenizer, as `headwater.train.load_run` returns it."""

    @property
    def model(self) -> Decoder: ...

    @property
    def tokenizer(self) -> Any: ...


def export_run(run: Run, out: str | Path | None = None) -> tuple[PreTrainedModel, Any]:
    """The model of a training run, residual included, as a transformers model, and its tokenizer.

    Arguments:
        run: what `headwater.train.load_run` returns.
        out: a folder to write both to, which must be new or empty; None writes nothing.

    Returns: a Llama, or a Qwen3 where heads are normed, or headwater's own decoder where it has parts
    that transformers has no counterpart for (`shortswa`, `value_residual`), in eval mode on the CPU;
    and a fast tokenizer.

    Raises: `headwater.errors.UserError` for an `out` that is not empty.

        run = headwater.train.load_run("runs/train")
        model, tokenizer = headwater.hf.export_run(run, out="exported")
        print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"))[0]))
    """
    out = None if out is None else at_home(out)
    if out is not None:
        check_out(out)
    config = run.model.config
    model = export(config.to_dict(), run.model.weights(), run.tokenizer.end_of_text)
    tokenizer = fast_tokenizer(run.tokenizer.to_json(), config.context)
    if out is not None:
        write_model(model, tokenizer, out)
    return model, tokenizer
