"""The settings of a run: six sections, filled by defaults, then a TOML or JSON file, then flags.

Each field is declared once. Its type and bounds are checked when a section is made, so that files,
flags and Python cannot differ in it, and its marks say what another value would change: see
`headwater.schema.Setting`. The section of the model is `ModelConfig` itself. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from headwater.errors import UnknownSetting, UserError, dotted, nearest, spelling
from headwater.folders import at_home
from headwater.models.config import ModelConfig
from headwater.schema import Section, Setting, setting, setting_of

TOKENIZERS = ("bytes", "bpe")  # any other name is a place to find one


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section, section="data"):
    """The text and its tokens."""

    source: tuple[str, ...] = ("stdlib",)
    """Text to train on: text, .jsonl or .json files, plain or as .gz, .xz or .zst (which needs
    headwater[zst]); folders, of which .txt, .md, .rst, .py and .jsonl files are read; stdlib,
    the running Python's standard library; or one folder of tokens that were made before, such
    as one in the cache."""
    text_field: str = "text"
    """Name of the field that holds the document in .jsonl and .json files."""
    tokenizer: str = "bytes"
    """Tokenizer: bytes; bpe, which is trained on the text; or the path of one that exists, which is a
    run, a checkpoint, an exported folder or a tokenizer.json."""
    bpe_vocab: int = setting(4096, least=257)
    """Size of the vocabulary to train if the tokenizer is bpe."""
    validation: float = setting(0.05, above=0, below=1)
    """Share of the text that is held out, in whole documents where that comes near."""
    cache: str | None = setting(None, changes="records")
    """Folder of token shards. Without it $HEADWATER_CACHE, else ~/.cache/headwater."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.text_field != "", "text_field", "must name a field")


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Section, section="optim"):
    """The optimizer, the learning rate and its schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon updates the matrices of the sublayers, and AdamW everything else."""
    lr: float = setting(3e-3, above=0, most=1e30)
    """Largest learning rate, which the warm-up ends with."""
    beta1: float = setting(0.9, least=0, below=1)
    """Decay of AdamW's mean of gradients, per step."""
    beta2: float = setting(0.95, least=0, below=1)
    """Decay of AdamW's mean of squared gradients, per step."""
    weight_decay: float = setting(0.1, least=0)
    """Weight decay of the matrices of the sublayers. All other parameters have none."""
    query_lr: float = setting(0.1, least=0, felt_by="queries")
    """Factor on the learning rate of the residual's queries, for residuals that have queries."""
    clip: float = setting(1.0, above=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Schedule of the learning rate after the warm-up: cosine falls all the way; wsd stays, then
    falls at the end."""
    warmup: int = setting(20, least=0)
    """Number of steps over which the learning rate rises."""
    decay: float = setting(0.2, least=0, most=1)
    """Share of the steps, at the end, over which wsd lets the learning rate fall."""
    final_lr: float = setting(0.1, least=0, most=1)
    """Learning rate after the last step, as a share of lr."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section, section="train"):
    """The length of a run, its device, and the records that it keeps."""

    steps: int = setting(500, least=1)
    """Number of updates of the weights."""
    batch_size: int = setting(16, least=1)
    """Number of windows in one step, over all micro-batches."""
    accumulate: int = setting(1, least=1, changes="rounding")
    """Number of micro-batches that one step is split into. Must divide batch_size."""
    seed: int = setting(0, least=0, most=2**31 - 1)
    """Random seed of the initial weights and of the order of the data."""
    init_from: str = ""
    """Run, checkpoint or exported model whose weights training begins with. Another residual
    begins at its own start."""
    device: str = "auto"
    """Device to train on: auto takes cuda if there is a GPU, else cpu."""
    compile: Literal["auto", "none", "layers", "model"] = setting("auto", changes="rounding")
    """Part that torch.compile takes: layers, each kind of sublayer, in seconds; model, the
    whole, in a minute or two. auto takes layers on a GPU, or the model in runs of 2000 steps
    or more with a residual that has no kernels, and none on a CPU."""
    graph: bool = setting(True, changes="rounding")
    """Capture a step as a CUDA graph where a GPU can do that, which frees the host."""
    checkpoint_activations: bool = setting(False, changes="rounding")
    """Recompute a sublayer in the backward pass instead of keeping what it computed."""
    deterministic: bool = True
    """Choose kernels that resume bitwise on a GPU, at some cost in speed."""
    log_every: int = setting(10, least=1, changes="records")
    """Number of steps between records of loss, gradient norm and speed."""
    eval_every: int = setting(100, least=1, changes="records")
    """Number of steps between evaluations on held-out text."""
    eval_windows: int = setting(64, least=1)
    """Number of windows of held-out text in an evaluation, which are always the same."""
    depth_every: int = setting(100, least=1, changes="records")
    """Number of steps between records of norms, gradients and depth weights."""
    save_every: int = setting(100, least=1, changes="records")
    """Number of steps between checkpoints."""
    keep: int = setting(3, least=1, changes="records")
    """Number of checkpoints to keep."""
    async_save: bool = setting(False, changes="records")
    """Write checkpoints beside the next steps, from a copy in host memory."""
    # A run that one bad batch has stopped may go on without that batch.
    skip_nonfinite: int = setting(0, least=0, resumable=True)
    """Number of steps in a row that may be left out because their loss or gradient is not
    finite, before the run stops."""
    skip_spikes: int = setting(0, least=0, resumable=True)
    """Number of steps in a row that may be left out because their loss is a spike, before the
    run stops. 0 takes every finite step."""
    spike_sigmas: float = setting(6.0, above=0, resumable=True)
    """Distance of a spike from the median of the last losses, in standard deviations."""
    spike_window: int = setting(64, least=2)
    """Number of last losses that define a spike. No step is a spike before there are as many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        equal = self.batch_size % self.accumulate == 0
        must = f"must be a multiple of accumulate, {self.accumulate}: micro-batches are equal"
        self.require(equal, "batch_size", must)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Section, section="parallel"):
    """The division of the work among the processes that torchrun started."""

    pipeline: int = setting(1, least=1, changes="records")
    """Number of ranks in a row that divide the depth. accumulate is then the number of
    micro-batches in flight."""
    chunks: int = setting(1, least=1, changes="records")
    """Number of slices of depth on each rank of the row, for the interleaved schedule."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = setting("1f1b", changes="records")
    """Schedule of the pipeline: gpipe keeps the activations of all micro-batches, 1f1b those in
    flight."""
    cuts: tuple[int, ...] = setting((), changes="records")
    """Sublayers before which the depth is cut, in order. Without them slices are as equal as
    they can be."""
    block_cache: bool = setting(True, changes="records")
    """Keep what a rank has seen of a state, and send only what is new to it."""
    tensor: int = setting(1, least=1, changes="records")
    """Number of ranks that divide the tokens of each window and, inside attention and MLP, its
    heads and channels."""
    shard: int = setting(0, least=0, changes="records")
    """Number of ranks that divide each parameter among them (FSDP2). 0 takes all ranks; 1 leaves
    every rank its own copy."""
    hang_timeout: int = setting(1800, least=0, changes="records")
    """Longest time of a step, in seconds, before every rank prints its stack and ends. 0 waits
    without end."""


@dataclass(frozen=True, kw_only=True)
class LogSettings(Section, section="log"):
    """Destinations of the metrics besides metrics.jsonl."""

    wandb: str = setting("", changes="records")
    """Project of Weights & Biases that gets the metrics too. Needs headwater[wandb]."""
    tensorboard: bool = setting(False, changes="records")
    """Write the metrics for TensorBoard into the run's folder too. Needs headwater[tensorboard]."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run, as `headwater.train.train` and the `headwater` command take it. Every value
    has a default.

    `dataclasses.replace` makes another one; config.json in a run's folder holds it, and `load_file`
    reads it back.

        model = ModelConfig.named("nano", residual="attnres-full")
        config = Config(model=model, train=TrainSettings(steps=200))
        longer = replace(config, train=replace(config.train, steps=400))
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def over(self, values: Mapping[str, Any]) -> Self:
        """Return this run with other settings, section by section, as a file or flags give them."""
        # Names are checked here, values in the constructors of the sections.
        sections: dict[str, Any] = {}
        for name, settings in values.items():
            section = getattr(self, name, None)
            if not isinstance(section, Section):
                raise UnknownSetting(f"unknown section {name!r}; {_place_of(name, SECTIONS)}")
            if not isinstance(settings, Mapping):
                raise UnknownSetting(f"{name} must be a section of settings; got {settings!r}")
            names = _names_in(name)
            for key in settings:
                if key not in names:
                    raise UnknownSetting(f"unknown setting {name}.{key}; {_place_of(key, names)}")
            sections[name] = section.over(settings)
        return replace(self, **sections)

    def flat(self) -> dict[str, Any]:
        """Return every setting by its dotted name, such as "optim.lr"."""
        return flatten(asdict(self))


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataSettings,
    "optim": OptimSettings,
    "train": TrainSettings,
    "parallel": ParallelSettings,
    "log": LogSettings,
}

# What the schema says of every setting of a run, by dotted name, such as "optim.lr".
SETTINGS: dict[str, Setting] = {
    f"{name}.{declared.name}": setting_of(declared)
    for name, section in SECTIONS.items()
    for declared in fields(section)  # type: ignore[arg-type]
}


def _names_in(section: str) -> list[str]:
    """The settings that a file may have in a section. The size of a model stands for many
    settings."""
    names = [declared.name for declared in fields(SECTIONS[section])]  # type: ignore[arg-type]
    return ["size", *names] if section == "model" else names


def _place_of(key: str, valid: Iterable[str]) -> str:
    """Say in which section a setting stands that was looked for elsewhere, else name the
    nearest."""
    # A known setting under the wrong section is answered with its section.
    for name in SETTINGS:
        section, _, last = name.partition(".")
        if last == key:
            return f"it stands under [{section}]"
    return nearest(key, valid)


def load_file(path: str | Path, base: Config | None = None) -> Config:
    """Read settings from a file.

    Arguments:
        path: a TOML file, or a JSON file such as a run's config.json, or the run's folder.
        base: the settings that it overrides; by default the defaults.

    Returns a `Config`.
    Raises: `UserError` for a file that cannot be read, an unknown setting (naming the nearest) or a
        value that a setting cannot have.

        config = load_file("runs/first/config.json")
    """
    path = at_home(path)
    path = path / "config.json" if path.is_dir() else path
    # JSON is what a run writes, TOML what a person writes.
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"no configuration file at {path}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"cannot read the configuration {path}: {error}") from None
    with said_of(str(path)):
        return (base or Config()).over(values)


@contextmanager
def said_of(file: str) -> Iterator[None]:
    """Put the name of a file before errors about its settings, and spell settings as files have
    them."""
    with spelling(dotted):
        try:
            yield
        except UserError as error:
            raise UserError(f"{file}: {error}") from None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested sections into one mapping by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
