"""The settings of a run: six sections, filled by defaults, then a TOML or JSON file, then flags.

Each field is declared once. Its type and bounds are checked when a section is made, so that files,
flags and Python cannot differ in it, and its marks say what another value would change: see
`headwater.schema.Setting`. The section of the model is `ModelConfig` itself. Nothing here imports torch.
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
    """The text, and how it becomes tokens."""

    source: tuple[str, ...] = ("stdlib",)
    """Text, .jsonl or .json files, plain, .gz, .xz or .zst (which needs headwater[zst]), or folders, of
    which .txt, .md, .rst, .py and .jsonl files are read; `stdlib` is the running Python's standard
    library. Or one folder of tokens that were made before, such as one that the cache holds, from here
    or from another machine."""
    text_field: str = "text"
    """Name of the field that holds the document in .jsonl and .json files."""
    tokenizer: str = "bytes"
    """bytes; or bpe, which is trained on the text itself and needs headwater[bpe]; or a tokenizer that
    exists: a run, a checkpoint, what headwater export wrote or a tokenizer.json."""
    bpe_vocab: int = setting(4096, least=257)
    """Vocabulary to train when the tokenizer is bpe."""
    validation: float = setting(0.05, above=0, below=1)
    """Share of the text held out, by whole documents where that comes near."""
    cache: str | None = setting(None, changes="records")
    """Folder of token shards; defaults to $HEADWATER_CACHE, then ~/.cache/headwater."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.text_field != "", "text_field", "must name a field")


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Section, section="optim"):
    """How weights are updated."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon takes the matrices of the sublayers; everything else stays with AdamW."""
    lr: float = setting(3e-3, above=0, most=1e30)
    """Largest learning rate, at the end of the warm-up."""
    beta1: float = setting(0.9, least=0, below=1)
    """AdamW's memory of gradients."""
    beta2: float = setting(0.95, least=0, below=1)
    """AdamW's memory of their squares."""
    weight_decay: float = setting(0.1, least=0)
    """Weight decay of the matrices of the sublayers, and of nothing else."""
    query_lr: float = setting(0.1, least=0, felt_by="queries")
    """Factor on the learning rate of the residual's queries, in residuals that have some.
    docs/results/study-tables.md says why."""
    clip: float = setting(1.0, above=0)
    """Largest gradient norm."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """wsd: warm-up, stay, decay at the end."""
    warmup: int = setting(20, least=0)
    """Steps of linear warm-up."""
    decay: float = setting(0.2, least=0, most=1)
    """Share of the steps over which wsd decays."""
    final_lr: float = setting(0.1, least=0, most=1)
    """Learning rate after the last step, as a share of lr."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section, section="train"):
    """How long, in which portions, on what, and what is kept on the way."""

    steps: int = setting(500, least=1)
    """Updates of the weights."""
    batch_size: int = setting(16, least=1)
    """Windows in one step, over all micro-batches."""
    accumulate: int = setting(1, least=1, changes="rounding")
    """Micro-batches that one step is split into."""
    seed: int = setting(0, least=0, most=2**31 - 1)
    """Draws the initial weights and the order of the data."""
    init_from: str = ""
    """Begin with the weights of this run, checkpoint or exported model; another residual begins at its
    own start."""
    device: str = "auto"
    """auto is cuda where there is one, else cpu."""
    compile: Literal["auto", "none", "layers", "model"] = setting("auto", changes="rounding")
    """layers: what a sublayer does, once for all of a kind, in seconds; model: the whole, in a minute or
    two. auto on a GPU is layers, but the model in runs of 2000 steps or more with a residual that has no
    kernels; else none."""
    graph: bool = setting(True, changes="rounding")
    """On a GPU, capture a step as a CUDA graph, where that can be done: the host then costs nothing."""
    checkpoint_activations: bool = setting(False, changes="rounding")
    """Recompute a sublayer in the backward pass instead of keeping what it computed."""
    deterministic: bool = True
    """On a GPU, choose kernels that resume bitwise, at some cost in speed."""
    log_every: int = setting(10, least=1, changes="records")
    """Steps between records of loss, gradient norm and speed."""
    eval_every: int = setting(100, least=1, changes="records")
    """Steps between evaluations on held-out text."""
    eval_windows: int = setting(64, least=1)
    """Windows of held-out text in an evaluation, always the same."""
    depth_every: int = setting(100, least=1, changes="records")
    """Steps between records of norms, gradients and depth weights."""
    save_every: int = setting(100, least=1, changes="records")
    """Steps between checkpoints."""
    keep: int = setting(3, least=1, changes="records")
    """Checkpoints to keep."""
    async_save: bool = setting(False, changes="records")
    """Write checkpoints beside the next steps, from a copy in host memory."""
    # A run that one bad batch has stopped may go on without that batch.
    skip_nonfinite: int = setting(0, least=0, resumable=True)
    """Steps in a row to leave out because their loss or gradient is not finite, before the run stops."""
    skip_spikes: int = setting(0, least=0, resumable=True)
    """Steps in a row to leave out because their loss is a spike, before the run stops; 0 takes every
    finite step."""
    spike_sigmas: float = setting(6.0, above=0, resumable=True)
    """Standard deviations between a spike and the median of the last losses."""
    spike_window: int = setting(64, least=2)
    """Losses that a spike is measured against; before there are as many, no step is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        equal = self.batch_size % self.accumulate == 0
        must = f"must be a multiple of accumulate, {self.accumulate}: micro-batches are equal"
        self.require(equal, "batch_size", must)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Section, section="parallel"):
    """How the processes that torchrun started share the work; one process has nothing to share."""

    pipeline: int = setting(1, least=1, changes="records")
    """Ranks in a row that divide the depth; accumulate is then the number of micro-batches in flight."""
    chunks: int = setting(1, least=1, changes="records")
    """Slices of depth on each rank of the row: the interleaved schedule."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = setting("1f1b", changes="records")
    """gpipe keeps the activations of all micro-batches; 1f1b those in flight."""
    cuts: tuple[int, ...] = setting((), changes="records")
    """Sublayers before which the depth is cut, in order; left out, slices are as equal as can be."""
    block_cache: bool = setting(True, changes="records")
    """Keep what a rank has seen of a state, and send only what is new to it."""
    tensor: int = setting(1, least=1, changes="records")
    """Ranks that divide each window's tokens, and inside attention and MLP its heads and channels."""
    shard: int = setting(0, least=0, changes="records")
    """Ranks that divide each parameter among them (FSDP2); 0 is all, 1 leaves every rank its own copy."""
    hang_timeout: int = setting(1800, least=0, changes="records")
    """Seconds a step may take before every rank prints its stack and ends; 0 waits for ever."""


@dataclass(frozen=True, kw_only=True)
class LogSettings(Section, section="log"):
    """Where metrics go besides metrics.jsonl."""

    wandb: str = setting("", changes="records")
    """Project of Weights & Biases; needs headwater[wandb]."""
    tensorboard: bool = setting(False, changes="records")
    """Write for TensorBoard into the run's folder; needs headwater[tensorboard]."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run, as `headwater.train.train` and the `headwater` command take it. Every value has a
    default.

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
    f"{name}.{each.name}": setting_of(each)
    for name, section in SECTIONS.items()
    for each in fields(section)  # type: ignore[arg-type]
}


def _names_in(section: str) -> list[str]:
    """The settings that a file may have in a section. The size of a model stands for many settings."""
    names = [each.name for each in fields(SECTIONS[section])]  # type: ignore[arg-type]
    return ["size", *names] if section == "model" else names


def _place_of(key: str, valid: Iterable[str]) -> str:
    """Say in which section a setting stands that was looked for elsewhere, else name the nearest."""
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
    """Put the name of a file before errors about its settings, and spell settings as files have them."""
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
