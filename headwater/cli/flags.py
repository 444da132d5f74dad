"""The flags of every command: dataclasses that tyro turns into a command line, and how they are read and combined with
files. No torch here, so that help is quick."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, TypeVar

import tyro

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.generation.sampling import Sampling
from headwater.models.config import SIZED, SIZES
from headwater.train.config import Config, ModelSettings, OptimSettings, TrainSettings, load_file
from headwater.train.differences import with_before

T = TypeVar("T")
Settings = Annotated[Config, tyro.conf.arg(name="")]

# Deep and narrow, so that how depth is connected matters: 24 sublayers of 64 channels. Sized for two CPU cores.
# The learning rate is the plain residual's best of 3e-3, 6e-3 and 1e-2 (docs/results/log.md).
DEMO: dict[str, Any] = {
    "residuals": ("standard", "attnres-block", "attnres-full"),
    "seeds": (0, 1),
    "model": ModelSettings(size="deep", layers=12),
    "optim": OptimSettings(lr=6e-3, warmup=20),
    "train": TrainSettings(
        steps=200,
        batch_size=8,
        eval_every=50,
        eval_windows=64,
        depth_every=50,
        save_every=100,
        keep=1,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PluginFlags:
    plugin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A module of yours that registers residuals; once for each. Installed packages need none: see
    docs/guides/new-residual.md."""


@dataclass(frozen=True, kw_only=True)
class Where(PluginFlags):
    out: Path = Path("runs/train")
    """Folder of the run."""
    config: Path | None = None
    """TOML file with [model], [data], [optim] and [train]; or another run, or its config.json. Flags override it."""
    resume: bool = False
    """Continue from the newest checkpoint, under the settings the run began with."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(Where):
    settings: Settings = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class CompareFlags(Where):
    out: Path = Path("runs/compare")
    """Folder of the comparison."""
    residuals: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--arms",))] = (
        "standard",
        "attnres-block",
        "attnres-full",
    )
    """What to compare, the baseline first; `all` is every registered residual. Settings of the model may follow, as in
    standard+shortswa=4 (--arms is the same flag). With --resume, what to add."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each residual is trained once with each; equal seeds see equal tokens. With --resume, what to add: a residual
    that is added is trained with those of before too."""
    jobs: int = 1
    """Runs at a time; the cores are shared among them."""
    settings: Settings = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class ReportFlags(PluginFlags):
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, a folder of runs, of a comparison or of a study, or converted transformers folders."""
    out: Path | None = None
    """The file to write; by default report.html, or matrix.html, in the first folder."""
    prompt: str = "def add(a, b):\n    return a +"
    """What a model of transformers reads, which has no records of training."""
    device: str = "cpu"
    """Where it reads it."""


@dataclass(frozen=True, kw_only=True)
class ResidualsFlags(PluginFlags):
    residuals: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names, with options if you like; all of them by default."""
    dim: int = 128
    layers: int = 12
    markdown: bool = False
    """As a Markdown table."""
    check: bool = False
    """Check instead, on 4 layers of width 32, that they keep what every residual promises: for whoever writes one."""


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(PluginFlags):
    folder: tyro.conf.Positional[Path]
    """A run, or one of its checkpoints; or a transformers folder, such as one that headwater convert wrote."""
    prompt: tuple[str, ...] = ("def ",)
    """One or several, of any lengths, which are continued together."""
    max_new_tokens: int = 100
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Sampling(temperature=0.8)
    )
    stop: tuple[str, ...] = ()
    """Words that end a text."""
    stream: bool = False
    """Show the text as it comes."""
    prefill_chunk: int | Literal["auto"] = "auto"
    """Read prompts in portions of so many tokens, which takes less memory; auto: as many as the free memory is for."""
    seed: int = 0
    """Of the draw; with several prompts, the next numbers for the next ones."""
    tensor: int = 1
    """Ranks that share the work, as many as torchrun has started: of a prompt's tokens each keeps its share."""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class InspectFlags(PluginFlags):
    models: tyro.conf.Positional[tuple[Path, ...]]
    """A run, a checkpoint, an exported model or a converted transformers folder; or two of them, side by side."""
    prompt: str = "def add(a, b):\n    return a +"
    top: int = 5
    """How many of the likeliest tokens to show."""
    removals: Literal["auto", "none", "sources", "pairs"] = "auto"
    """What to take away to see its effect: each source at all reads, or also at each read alone."""
    device: str = "cpu"
    out: Path = Path("inspect.html")
    """The page to write."""
    serve: bool = False
    """Serve the page with a prompt box, to this machine's browser alone, and write nothing."""
    port: int = 0
    """With --serve: of 127.0.0.1; 0 takes one that is free."""


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(PluginFlags):
    folder: tyro.conf.Positional[Path]
    """A transformers checkpoint folder; or anything that headwater generate takes, such as a run."""
    out: Path
    """Folder to write; AutoModelForCausalLM loads it after `import headwater.hf`."""
    residual: str | None = None
    """The residual to convert to, attnres-block by default. A run keeps its own unless one is given."""
    layout: str | None = None
    """How a decoder layer's parts are called, for an architecture that is not known: JSON, or a file of it, with fields
    of headwater.hf.Layout, such as '{"mlp_norm": "pre_feedforward_layernorm"}'."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Write the weights in this dtype; by default they are linked, not written again."""
    device: str = "cpu"
    """Where the model is tried before and after."""
    check: Literal["auto", "yes", "no"] = "auto"
    """Load the model and try it before and after; auto: where it takes at most half of the free memory."""
    remote_code: bool = False
    """Add a modeling file, with which trust_remote_code=True loads the folder where headwater is not installed."""


@dataclass(frozen=True, kw_only=True)
class RevertFlags(PluginFlags):
    folder: tyro.conf.Positional[Path]
    """A converted checkpoint folder."""
    out: Path
    """Folder to write: the plain model."""


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(PluginFlags):
    folders: tyro.conf.Positional[tuple[Path, Path]]
    """Two transformers checkpoint folders."""
    tokens: int = 64
    """Random tokens a row."""
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What both are loaded in; by default what they are stored in."""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class EvalFlags(PluginFlags):
    folder: tyro.conf.Positional[Path]
    """A run, one of its checkpoints, or a transformers checkpoint folder, converted or not."""
    tasks: tuple[str, ...]
    """Names of lm-eval's tasks, groups or tags; with spaces or commas between them."""
    include_path: Path | None = None
    """Folder with YAML files of tasks of your own."""
    fewshot: int | None = None
    """Solved examples before each question; by default what the task says."""
    limit: int | None = None
    """Score only so many questions of each task."""
    batch_size: int = 8
    device: str = "cpu"
    unsafe_code: bool = False
    """Run the code that the model writes, as humaneval asks: on this machine, with your rights, nothing around it."""
    out: Path | None = None
    """The JSON file to write; by default eval.json in the folder."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(PluginFlags):
    config: Path | None = None
    """TOML file of the run; or another run, or its config.json. Flags override it."""
    world: int = 1
    """Processes, one for each GPU."""
    memory: float = 80.0
    """GiB on each of them."""
    gpu: bool = True
    """bf16 and fused reads, as on a GPU; otherwise fp32 and the reference operators."""
    settings: Settings = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class ExportFlags(PluginFlags):
    folder: tyro.conf.Positional[Path]
    """A run, or one of its checkpoints, saved by any number of ranks."""
    out: Path
    """Folder for model.safetensors, config.json and tokenizer.json."""


@dataclass(frozen=True, kw_only=True)
class StudyFlags(PluginFlags):
    recipe: tyro.conf.Positional[Path]
    """TOML file that names settings and lists of them."""
    out: Path | None = None
    """Folder of the study; by default runs/ and its name."""
    minutes: float = math.inf
    """Start no run after them, and save those under way: the next call goes on."""
    whole: bool = False
    """Start no run that would not end by then, going by those that have, but a shorter one instead: for a machine whose
    disk is lost."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags(PluginFlags):
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or a folder of runs, of a comparison or of a study."""
    baseline: str = "standard"
    """The residual whose compute the others are measured in."""
    lr: float | Literal["best"] | None = None
    """Of runs with several learning rates, those with this one; best: of each residual and size, those with the one at
    which their mean loss is lowest."""
    out: Path | None = None
    """The plot; by default scaling.svg in the first folder."""


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    out: Path = Path("runs/demo")
    jobs: int = 2
    """Runs at a time."""


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """None: it looks, and tells."""


WRITTEN = ("--out", "--cache")  # where commands write; what is only read is never in the way
# What other trainers call a flag of a run, where the name is too far from ours to be guessed.
THEIRS = {
    "--learning-rate": "--lr",
    "--max-steps": "--steps",
    "--max-iters": "--steps",
    "--warmup-steps": "--warmup",
    "--hidden-size": "--dim",
    "--d-model": "--dim",
    "--intermediate-size": "--mlp-dim",
    "--seq-len": "--context",
    "--block-size": "--context",
    "--gradient-accumulation-steps": "--accumulate",
}


def flag_of(words: Sequence[str], path: str | None) -> str | None:
    """The flag that led to a path that was to be written: the one whose value is the path or a folder above it."""
    flags = [
        word.split("=", 1) if "=" in word else [word, after]
        for word, after in zip(words, [*words[1:], ""])
    ]
    above = [Path(path or ".").absolute(), *Path(path or ".").absolute().parents]
    found = (
        flag
        for flag, value in flags
        if flag in WRITTEN and value and Path(value).absolute() in above
    )
    return next(found, None)


def peek(argv: list[str], default: Where) -> Where:
    """The flags that decide which defaults the other flags override."""
    for flag in (word.partition("=")[0] for word in argv):
        if ours := THEIRS.get(flag.replace("_", "-")):
            raise UserError(f"unknown flag {flag}: here it is {ours}")
    return paths_at_home(
        tyro.cli(Where, args=argv, default=default, return_unknown_args=True, add_help=False)[0]
    )


def paths_at_home(found: T) -> T:
    """Paths with ~ as a folder of one's own: a shell does that for `--out ~/run`, and leaves `--out=~/run` as it is."""
    values = {each.name: getattr(found, each.name) for each in fields(found)}  # type: ignore[arg-type]
    paths = {name: at_home(value) for name, value in values.items() if isinstance(value, Path)}
    return replace(found, **paths)  # type: ignore[type-var]


def base_config(where: Where, saved: Path) -> Config:
    """Defaults, or what the folder to resume began with; then the configuration file."""
    folder = saved.parent
    if where.resume and (folder / "state.json").is_file():
        raise UserError(
            f"{folder} is a checkpoint, and a run goes on from its newest: --resume with --out "
            f"{quote(str(folder.parent.parent))}, or begin a run with these weights, in another --out and with "
            f"--init-from {quote(str(folder))}"
        )
    base = load_file(saved, with_before(Config())) if where.resume and saved.exists() else Config()
    return load_file(where.config, base) if where.config else base


def sized(settings: Config, argv: list[str]) -> Config:
    """A --size given as a flag overrides the shape and the parts that a configuration file spells out, also those that
    the size does not have, such as experts; other flags override it."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    if "size" not in given:
        return settings
    model = settings.model
    shape: dict[str, Any] = {
        key: None for key in SIZED.union(SIZES.get(model.size, ())) if key not in given
    }
    return replace(settings, model=replace(model, **shape))


def parse(
    flags: type[T],
    argv: list[str],
    command: Callable[..., None],
    default: T | None = None,
    name: str | None = None,
) -> T:
    """`name`: of the command, where it cannot be the function's."""
    settings = {
        "prog": f"headwater {name or command.__name__}",
        "description": command.__doc__,
        "args": argv,
    }
    extra = {} if default is None else {"default": default}
    shape = (
        tyro.conf.OmitArgPrefixes,
        tyro.conf.HelptextFromCommentsOff,
    )  # comments are for readers of the code
    found: T = paths_at_home(tyro.cli(flags, config=shape, **settings, **extra))  # type: ignore[call-overload]
    _refuse_repeats(found, argv)
    if isinstance(found, PluginFlags) and found.plugin:
        from headwater.residuals import import_plugins

        import_plugins(found.plugin)
    return found


def _refuse_repeats(found: Any, argv: Sequence[str]) -> None:
    """A list that is given twice would be the second alone; a single value may be, as where a script adds to flags, but
    not the residual of a run: whoever names two means two runs."""
    given = Counter(word.partition("=")[0] for word in argv if word.startswith("--"))
    for name in _lists(found):
        spelt = (f"--{name.replace('_', '-')}", *(("--arms",) if name == "residuals" else ()))
        if sum(given[flag] for flag in spelt) > 1:
            typed = [flag for flag in spelt if given[flag]]
            said = (
                f"{typed[0]} is given twice"
                if len(typed) == 1
                else f"{' and '.join(typed)} are one flag"
            )
            raise UserError(f"{said}: give it once, with all its values after it")
    if isinstance(found, TrainFlags) and given["--residual"] > 1:
        raise UserError(
            "--residual is given twice, and a run has one residual: give it once; or train a run with each: "
            "headwater compare --residuals, with both after it"
        )


def _lists(found: Any) -> Iterator[str]:
    for each in fields(found):
        value = getattr(found, each.name)
        if is_dataclass(value):
            yield from _lists(value)
        elif isinstance(value, tuple) and each.name != "plugin":
            yield each.name
