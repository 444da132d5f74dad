"""A trained model back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import UserError, spell, user_values
from headwater.folders import find_model
from headwater.models import Decoder, ModelConfig
from headwater.residuals import pinned
from headwater.runs.files import read_json
from headwater.runs.settings import Config, said_of
from headwater.train.checkpoint.folder import STATE, load_model, read_state
from headwater.train.data.tokenizer import Tokenizer

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
    """The result of `load_run`: `.model`, `.tokenizer`, `.config`; it also unpacks in this order."""

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
            may have been saved by any number of ranks. "demo" is a small trained model that comes with headwater.
        device: where the weights go, as torch names it.

    Returns: a `LoadedRun` with `.model`, `.tokenizer` and `.config`.

    Raises: `headwater.errors.UserError` if the folder holds no checkpoint, a damaged one, or a transformers model.

        run = load_run("runs/train")
        print(run.config.optim.lr, run.model(torch.tensor([run.tokenizer.encode("def ").tolist()])).shape)
    """
    folder = find_model(folder).resolve()
    if (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json"):
        raise UserError(
            f"{folder} is a transformers model: AutoModelForCausalLM loads it after `import headwater.hf`"
        )
    # What follows reads every byte against its hash.
    model, tokenizer = load_model(folder, device)
    return LoadedRun(model, tokenizer, settings_of(folder))


def fill_from(model: Decoder, tokenizer: Tokenizer, folder: str | Path) -> None:
    """Give a new model the weights of a trained one, as `load_run` finds it; its residual keeps its own start where the
    trained one's is another.

    Raises: `UserError` if the tokenizers differ, or the shapes, or settings under which the weights that fit would
        compute something else.
    """
    trained, its_tokenizer, _ = load_run(folder)
    # An embedding belongs to the tokens of its tokenizer.
    if its_tokenizer.to_json() != tokenizer.to_json():
        raise UserError(
            f"{spell('train.init_from')} {folder} was trained with another tokenizer "
            f"({its_tokenizer.vocab_size} tokens, {tokenizer.vocab_size} here): its embeddings stand for other tokens. "
            f"Take its tokenizer, for whatever text, with {spell('data.tokenizer', str(folder))}"
        )
    weights = trained.weights()
    if pinned(trained.residual) != pinned(model.residual):
        # Another residual keeps its own start.
        fresh = model.weights()
        weights = {key: value for key, value in weights.items() if not is_residual(key)}
        weights |= {key: value for key, value in fresh.items() if is_residual(key)}
    with user_values():
        model.load_weights(weights)
    # Weights may fit and still compute something else here.
    lines, flags = [], []
    for name, (there, here) in unseen_differences(trained.config, model.config).items():
        lines.append(f"model.{name}: {there!r} there, {here!r} here")
        flags.append(spell(f"model.{name}", there))
    if lines:
        listing = "\n  ".join(lines)
        raise UserError(
            f"{spell('train.init_from')} {folder} was trained with other settings, under which the same weights "
            f"compute something else:\n  {listing}\nTake those it was trained with: {' '.join(flags)}"
        )


def is_residual(name: str) -> bool:
    return name.startswith("residual.")


def unseen_differences(there: ModelConfig, here: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ and that names and shapes of weights do not show, with both values."""
    differing = {}
    for name, parts in UNSEEN.items():
        # A setting of a sublayer that the model does not have changes nothing.
        values = getattr(there, name), getattr(here, name)
        concerned = not parts or bool(parts & set(here.kinds))
        if concerned and values[0] != values[1]:
            differing[name] = values
    if here.context > there.context:  # the base is stretched, as one does for longer texts
        differing.pop("rope_theta", None)
    if there.layout == here.layout:  # a pattern that is spelled otherwise
        differing.pop("pattern", None)
    return differing


def settings_of(folder: Path) -> Config | None:
    """The settings of a run or of a checkpoint; None for a model that was saved by itself."""
    if (folder / STATE).is_file():
        saved = read_state(folder)["config"]
    else:
        saved = read_json(folder / "config.json")
    if "train" not in saved:
        return None
    settings = {key: value for key, value in saved.items() if key != "corpus"}
    with said_of(str(folder)):
        return Config().over(settings)
