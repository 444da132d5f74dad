"""A trained model back from its folder."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import NamedTuple

from headwater.errors import UserError, spell
from headwater.folders import at_home
from headwater.models import Decoder
from headwater.residuals import pinned
from headwater.runs.settings import Config, said_of
from headwater.train.checkpoint.folder import STATE, load_model, read_state
from headwater.train.data.tokenizer import Tokenizer
from headwater.train.files import read_json

# Settings of a model that change what its weights compute, and that their names and shapes do not show; and, where they
# are not of every model, of which sublayers.
UNSEEN: dict[str, set[str]] = {
    "pattern": set(),
    "heads": set(),
    "kv_heads": set(),
    "norm_eps": set(),
    "shortswa": {"shortswa"},
    "rope_theta": {"attention", "shortswa"},
    "kda_gate": {"kda"},
    "kda_norm_eps": {"kda"},
    "experts_per_token": {"moe"},
    "expert_scale": {"moe"},
}


class LoadedRun(NamedTuple):
    """What `load_run` returns: `.model`, `.tokenizer`, `.config`; it also unpacks in this order."""

    model: Decoder
    """In training mode, as PyTorch builds it: call `.eval()` before measuring."""
    tokenizer: Tokenizer
    """`encode(text)` gives ids as a numpy array of small integers (`.tolist()` before torch), `decode(ids)` text."""
    config: Config | None
    """The settings the weights were trained with; None of a model saved by itself. Its shape is `model.config`."""


def load_run(folder: str | Path, device: str = "cpu") -> LoadedRun:
    """The model, tokenizer and settings of a training run.

    Arguments:
        folder: a run (its newest checkpoint is taken), one of its checkpoints, or what `headwater export` wrote. It
            may have been saved by any number of ranks.
        device: where the weights go, as torch names it.

    Returns: a `LoadedRun` with `.model`, `.tokenizer` and `.config`.

    Raises: `headwater.errors.UserError` if the folder holds no checkpoint, a damaged one, or a transformers model.

        run = load_run("runs/train")
        print(run.config.optim.lr, run.model(torch.tensor([run.tokenizer.encode("def ").tolist()])).shape)
    """
    folder = at_home(folder).resolve()
    if not folder.is_dir():
        raise UserError(
            f"no checkpoint in {folder}, which is not a folder: give a run, a checkpoint or a model's folder"
        )
    if (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json"):
        raise UserError(
            f"{folder} is a transformers model: AutoModelForCausalLM loads it after `import headwater.hf`"
        )
    model, tokenizer = load_model(folder, device)
    return LoadedRun(model, tokenizer, settings_of(folder))


def fill_from(model: Decoder, tokenizer: Tokenizer, folder: str | Path) -> None:
    """Give a new model the weights of a trained one, as `load_run` finds it; its residual keeps its own start where the
    trained one's is another.

    Raises: `UserError` if the tokenizers differ, or the shapes, or settings under which the weights that fit would
        compute something else.
    """
    other, theirs, _ = load_run(folder)
    if theirs.to_json() != tokenizer.to_json():
        ours = "as many" if tokenizer.vocab_size == theirs.vocab_size else tokenizer.vocab_size
        raise UserError(
            f"{spell('train.init_from')} {folder} was trained with another tokenizer "
            f"({theirs.vocab_size} tokens; this run's has "
            f"{ours}, and not the same): its embeddings stand for other tokens. Take its tokenizer, for whatever "
            f"text, with {spell('data.tokenizer')} {quote(str(folder))}"
        )
    weights = other.weights()
    if pinned(other.residual) != pinned(model.residual):
        own = {
            name: tensor for name, tensor in model.weights().items() if name.startswith("residual.")
        }
        weights = {
            name: tensor for name, tensor in weights.items() if not name.startswith("residual.")
        } | own
    try:
        model.load_weights(weights)
    except ValueError as error:
        raise UserError(f"{spell('train.init_from')} {folder}: {error}") from None
    there, here = other.config, model.config
    stretched = (
        {"rope_theta"} if here.context > there.context else set()
    )  # as one does for longer texts
    of_these = [name for name, parts in UNSEEN.items() if not parts or parts & set(here.kinds)]
    unlike = [
        name
        for name in of_these
        if name not in stretched and getattr(there, name) != getattr(here, name)
    ]
    if there.layout == here.layout and "pattern" in unlike:  # spelled otherwise
        unlike.remove("pattern")
    if unlike:
        listing = "\n  ".join(
            f"model.{name}: {getattr(there, name)!r} there, {getattr(here, name)!r} here"
            for name in unlike
        )
        take = " ".join(
            f"--{name.replace('_', '-')} {quote(str(getattr(there, name)))}" for name in unlike
        )
        raise UserError(
            f"{spell('train.init_from')} {folder} was trained with other settings, under which "
            "the same weights compute something "
            f"else:\n  {listing}\nTake those it was trained with: {take}"
        )


def settings_of(folder: Path) -> Config | None:
    """The settings of a run or of a checkpoint that has been read."""
    saved = (
        read_state(folder)["config"]
        if (folder / STATE).is_file()
        else read_json(folder / "config.json")
    )
    if "train" not in saved:
        return None
    settings = {key: value for key, value in saved.items() if key != "corpus"}
    with said_of(str(folder)):
        return Config().over(settings)
