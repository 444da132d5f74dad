"""What a run is: six frozen dataclasses, filled from defaults, then a TOML (or JSON) file, then flags.

Nothing here imports torch, so that `--help` stays fast. `model` mirrors `headwater.models.ModelConfig`: None means
"as the named size says".
"""

from __future__ import annotations

import json
import math
import tomllib
import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headwater.errors import UserError, nearest
from headwater.folders import at_home
from headwater.models.config import SIZES

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The decoder. None is what the named size says."""

    size: str = "tiny"
    """Named size; every other field of this section overrides it."""
    residual: str = "standard"
    """How depth is connected, e.g. attnres-block:block=4."""
    vocab_size: int | None = None
    """Defaults to the tokenizer's, rounded up to a multiple of 64."""
    dim: int | None = None
    """Channels of the residual stream."""
    layers: int | None = None
    """Each of an attention and an MLP, which are two sublayers."""
    heads: int | None = None
    """Of queries; they divide dim into an even number of channels each."""
    kv_heads: int | None = None
    """Of keys and values; they divide heads."""
    mlp_dim: int | None = None
    """Hidden channels of an MLP."""
    context: int | None = None
    """Tokens in a training window."""
    shortswa: int | None = None
    """Begin each layer with attention over this many last tokens."""
    value_residual: bool | None = None
    """Mix the first attention's values into every other's. Off by default, in every size."""
    qk_norm: bool | None = None
    """RMSNorm on every head's queries and keys: steadier at high learning rates. Off by default, in every size."""
    tie_embeddings: bool | None = None
    """One matrix for the embedding and the output head. Off by default, in every size."""
    fp32_stream: bool | None = None
    """On a GPU, keep the residual in fp32: more exact sums, twice the bytes. By default it is bf16 as the sublayers."""
    depth_start: bool | None = None
    """Start output projections smaller by the root of the number of sublayers, which is the default."""
    rope_theta: float | None = None
    """Base of the rotary embedding's wavelengths."""
    norm_eps: float | None = None
    """Of every RMSNorm."""
    pattern: str | None = None
    """Mixers layer by layer, a period or all: attention, kda, mla, as in kda:kda:kda:mla or kda*3:mla; kda+mlp names
    the feed-forward too."""
    kda_heads: int | None = None
    """Heads of Kimi Delta Attention; 0 is as many as heads."""
    kda_head_dim: int | None = None
    """Channels of each; 0 is as heads divide dim."""
    kda_conv: int | None = None
    """Tokens that its short convolutions see."""
    kda_gate: Literal["softplus", "bounded"] | None = None
    """Its decay: as in Kimi Linear, which is the default, or never below exp(-5) a token, as in Kimi K3."""
    kda_norm_eps: float | None = None
    """Of the norm over what a head of it reads."""
    mla_latent: int | None = None
    """Channels of what MLA keeps of a token for all heads; 0 is four heads."""
    mla_head_dim: int | None = None
    """Channels of a head's own part of queries and keys; 0 is as heads divide dim."""
    mla_shared_dim: int | None = None
    """Channels of the key that heads share; 0 is half a head."""
    mla_value_dim: int | None = None
    """Channels of a head's values; 0 is as heads divide dim."""
    experts: int | None = None
    """In a mixture, which then is the feed-forward of layers; 0 is none."""
    experts_per_token: int | None = None
    """Experts that a token is sent to."""
    expert_dim: int | None = None
    """Hidden channels of an expert; 0 lets those of a token be as wide together as an MLP."""
    shared_experts: int | None = None
    """Experts besides that see every token."""
    expert_scale: float | None = None
    """Factor on the weights of a token's experts, which sum to one."""
    dense_layers: int | None = None
    """First layers that have an MLP in place of experts."""
    router_rate: float | None = None
    """How far a step moves each expert's bias toward an even load; 0 leaves it at zero."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text, and how it becomes tokens."""

    source: tuple[str, ...] = ("stdlib",)
    """Text, .jsonl or .json files, plain, .gz, .xz or .zst (which needs headwater[zst]), or folders, of which .txt,
    .md, .rst, .py and .jsonl files are read; `stdlib` is the running Python's standard library. Or one folder of tokens
    that were made before, such as one that --cache holds, from here or from another machine."""
    text_field: str = "text"
    """Where the objects of .jsonl and .json files have their document."""
    tokenizer: str = "bytes"
    """bytes; or bpe, which is trained on the text itself and needs headwater[bpe]; or one that is taken as it is, from
    a run, a checkpoint, what headwater export wrote or a tokenizer.json."""
    bpe_vocab: int = 4096
    """Vocabulary to train when the tokenizer is bpe; one that is taken as it is has its own."""
    validation: float = 0.05
    """Share of the text held out, by whole documents where that comes near."""
    cache: str | None = None
    """Where token shards are kept; defaults to $HEADWATER_CACHE, then ~/.cache/headwater."""


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """How weights are updated."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon takes the matrices of the sublayers; everything else stays with AdamW."""
    lr: float = 3e-3
    """Largest learning rate, at the end of the warm-up."""
    beta1: float = 0.9
    """AdamW's memory of gradients."""
    beta2: float = 0.95
    """AdamW's memory of their squares."""
    weight_decay: float = 0.1
    """For the matrices of the sublayers only."""
    query_lr: float = 0.1
    """Factor on the learning rate of the residual's queries, in residuals that have some; runs from before there was
    one have 1. docs/results/study-tables.md says why."""
    clip: float = 1.0
    """Largest gradient norm."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """wsd: warm-up, stay, decay at the end."""
    warmup: int = 20
    """Steps of linear warm-up."""
    decay: float = 0.2
    """Share of the steps over which wsd decays."""
    final_lr: float = 0.1
    """What the learning rate comes to after the last step, as a share of lr."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, in which portions, on what, and what is kept on the way."""

    steps: int = 500
    """Updates of the weights."""
    batch_size: int = 16
    """Windows in one step, over all micro-batches."""
    accumulate: int = 1
    """Micro-batches that one step is split into."""
    seed: int = 0
    """Draws the initial weights and the order of the data."""
    init_from: str = ""
    """Begin with the weights of this run, checkpoint or exported model; another residual begins at its own start."""
    device: str = "auto"
    """auto is cuda where there is one, else cpu."""
    compile: Literal["auto", "none", "layers", "model"] | bool = "auto"
    """layers: what a sublayer does, once for all of a kind, in seconds; model: the whole, in a minute or two. auto on a
    GPU is layers, but the model in runs of 2000 steps or more with a residual that has no kernels; else none."""
    graph: bool = True
    """On a GPU, capture a step as a CUDA graph, where that can be done: the host then costs nothing."""
    checkpoint_activations: bool = False
    """Recompute a sublayer in the backward pass instead of keeping what it computed."""
    deterministic: bool = True
    """On a GPU, choose kernels that resume bitwise, at some cost in speed."""
    log_every: int = 10
    """Steps between records of loss, gradient norm and speed."""
    eval_every: int = 100
    """Steps between evaluations on held-out text."""
    eval_windows: int = 64
    """Windows of held-out text in an evaluation, always the same."""
    depth_every: int = 100
    """Steps between records of norms, gradients and depth weights."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints to keep."""
    async_save: bool = False
    """Write checkpoints beside the next steps, from a copy in host memory."""
    skip_nonfinite: int = 0
    """Steps in a row to leave out because their loss or gradient is not finite, before the run stops."""
    skip_spikes: int = 0
    """Steps in a row to leave out because their loss is a spike, before the run stops; 0 takes every finite step."""
    spike_sigmas: float = 6.0
    """A spike lies this many standard deviations above the median of the last losses."""
    spike_window: int = 64
    """Losses that a spike is measured against; before there are as many, no step is one."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How the processes that torchrun started share the work; one process has nothing to share."""

    pipeline: int = 1
    """Ranks in a row that divide the depth; train.accumulate is then the number of micro-batches in flight."""
    chunks: int = 1
    """Slices of depth on each rank of the row: the interleaved schedule."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """gpipe keeps the activations of all micro-batches; 1f1b those in flight."""
    cuts: tuple[int, ...] = ()
    """Sublayers before which the depth is cut, in order; left out, the slices are as equal as can be."""
    block_cache: bool = True
    """Keep what a rank has seen of a state, and send only what is new to it."""
    tensor: int = 1
    """Ranks that divide each window's tokens, and inside attention and MLP its heads and channels."""
    shard: int = 0
    """Ranks that divide each parameter among them (FSDP2); 0 is all, 1 leaves every rank its own copy."""
    hang_timeout: int = 1800
    """Seconds a step may take before every rank prints its stack and ends; 0 waits for ever."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Where metrics go besides metrics.jsonl."""

    wandb: str = ""
    """Project of Weights & Biases; needs headwater[wandb]."""
    tensorboard: bool = False
    """Write for TensorBoard into the run's folder; needs headwater[tensorboard]."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run, as `headwater.train.train` and the `headwater` command take it. Every value has a default.

    `dataclasses.replace` makes another one; config.json in a run's folder holds it, and `load_file` reads it back.

        config = Config(model=ModelSettings(size="nano", residual="attnres-full"), train=TrainSettings(steps=200))
        longer = replace(config, train=replace(config.train, steps=400))
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    log: LogSettings = field(default_factory=LogSettings)


TOKENIZERS = ("bytes", "bpe")  # any other is where to find one


def load_file(path: str | Path, base: Config | None = None) -> Config:
    """Settings from a file.

    Arguments: `path`, a TOML file, or a JSON file such as a run's config.json, or the run's folder; `base`, what it
    overrides: by default the defaults.

    Returns a `Config`.
    Raises: `UserError` for a file that cannot be read, a study's recipe, an unknown key (naming the nearest) or a value
        of another type.

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
    if isinstance(values, dict) and "runs" in values:
        raise UserError(
            f"{path} is a recipe of several runs: make them with headwater study {quote(str(path))}"
        )
    return (override_saved if path.suffix == ".json" else override)(
        base or Config(), values, str(path)
    )


def override_saved(base: T, values: Any, where: str) -> T:
    """As `override`, with what a run has saved, perhaps one of another release."""
    try:
        return override(base, values, where)
    except UserError as error:
        raise UserError(f"{error}. If a newer headwater wrote it, read it with that") from None


def override(base: T, values: Any, where: str) -> T:
    """`base`, a dataclass, with the keys of a mapping over it. An unknown key or a wrong type is an error."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected a section of keys, got {values!r}")
    hints = get_type_hints(type(base))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            raise UserError(
                f"{where}: unknown key {key!r}; {_section_of(key) or nearest(key, hints)}"
            )
        current = getattr(base, key)
        inside = f"{where}: {key}"
        changes[key] = (
            override(current, value, inside)
            if is_dataclass(current)
            else convert(value, hints[key], inside)
        )
    return replace(base, **changes)  # type: ignore[type-var]


def _section_of(key: str) -> str:
    """Where a setting stands that was looked for elsewhere."""
    homes = (
        name.removesuffix(f".{key}")
        for name in flatten(asdict(Config()))
        if name.endswith(f".{key}")
    )
    return next((f"it stands under [{home}]" for home in homes), "")


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the field's type; only int to float, list to tuple and what is numpy's to Python's are converted."""
    value = [plain(item) for item in value] if isinstance(value, list) else plain(value)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, list):
            kind = get_args(option)[0]
            if all(type(item) is kind for item in value):
                return tuple(value)
        if option is float and type(value) in (int, float):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise UserError(f"{where} must be {_describe(options)}; got {value!r}")


def plain(value: Any) -> Any:
    """One thing of numpy, as a sweep gives it, as Python's; without numpy, which describing a run does not need."""
    return (
        value.item()
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
        else value
    )


def _describe(options: tuple[Any, ...]) -> str:
    def one(option: Any) -> str:
        if get_origin(option) is Literal:
            return " or ".join(repr(choice) for choice in get_args(option))
        if get_origin(option) is tuple:
            return "a list of strings" if get_args(option)[0] is str else "a list of integers"
        return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(
            option, "null"
        )

    return " or ".join(one(option) for option in options)


def check(config: Config) -> Config:
    """`config` with numbers and lists as its fields have them, if types and ranges hold: once, at the door of a run."""
    if not isinstance(config, Config):
        made = "`load_file` makes one of a file"
        raise UserError(
            f"the configuration must be a headwater.train.Config; got a {type(config).__name__}: {made}"
        )
    sections = asdict(config).items()
    given = {
        name: _with_lists(section) if isinstance(section, dict) else section
        for name, section in sections
    }
    config = override(Config(), given, "the configuration")
    flat = flatten(asdict(config))
    if config.model.size not in SIZES:
        raise UserError(
            f"model.size: unknown size {config.model.size!r}; {nearest(config.model.size, SIZES)}"
        )
    least = {f"train.{f.name}": 1 for f in fields(TrainSettings) if f.type == "int"}
    least |= {
        "train.seed": 0,
        "train.skip_nonfinite": 0,
        "train.skip_spikes": 0,
        "train.spike_window": 2,
    }
    least |= {
        "parallel.pipeline": 1,
        "parallel.chunks": 1,
        "parallel.tensor": 1,
        "parallel.shard": 0,
    }
    least |= {"data.bpe_vocab": 257, "optim.warmup": 0, "parallel.hang_timeout": 0}
    for key, low in least.items():
        if flat[key] < low:
            raise UserError(f"{key} must be at least {low}; got {flat[key]}")
    below_one = ("data.validation", "optim.beta1", "optim.beta2")
    for key in (*below_one, "optim.decay", "optim.final_lr"):
        if not 0 <= flat[key] <= 1 or (key in below_one and flat[key] == 1):
            raise UserError(f"{key} must lie between 0 and 1; got {flat[key]}")
    for key in ("optim.lr", "optim.clip", "data.validation", "train.spike_sigmas"):
        if not (flat[key] > 0 and math.isfinite(flat[key])):
            raise UserError(f"{key} must be a positive number; got {flat[key]}")
    limits = {"optim.lr": 1e30, "train.seed": 2**31 - 1}  # beyond them torch cannot take the number
    for key, high in limits.items():
        if flat[key] > high:
            raise UserError(f"{key} must be at most {high}; got {flat[key]}")
    for key in ("optim.weight_decay", "optim.query_lr"):
        if not 0 <= flat[key] < math.inf:
            raise UserError(f"{key} must be 0 or a positive number; got {flat[key]}")
    if config.train.batch_size % config.train.accumulate:
        raise UserError(
            f"train.batch_size ({config.train.batch_size}) must be a multiple of train.accumulate "
            f"({config.train.accumulate}): each micro-batch takes an equal share"
        )
    if not config.data.text_field:
        raise UserError("data.text_field must name a field")
    return config


def _with_lists(section: dict[str, Any]) -> dict[str, Any]:
    """As a file has it."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in section.items()
    }


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
