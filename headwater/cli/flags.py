"""The flags of every command, as dataclasses. No torch here, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headwater.cli.parser import POSITIONAL, SETTINGS
from headwater.generation.sampling import Sampling
from headwater.models.config import ModelConfig
from headwater.runs.settings import Config, OptimSettings, TrainSettings, load_file
from headwater.schema import Section, setting

SEEDS = (0, 1, 2)
RESIDUALS = ("standard", "attnres-block", "attnres-full")

# Deep and narrow, so that how depth is connected matters: 24 sublayers of 64 channels. Sized for two
# CPU cores. The learning rate is the plain residual's best of 3e-3, 6e-3 and 1e-2
# (docs/results/log.md).
DEMO: dict[str, Any] = {
    "residuals": RESIDUALS,
    "seeds": (0, 1),
    "model": ModelConfig.named("deep", layers=12),
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
class PluginFlags(Section, section=""):
    plugin: tuple[str, ...] = ()
    """Module of yours that registers residuals; one per flag. Installed packages need none: see
    docs/guides/new-residual.md."""


@dataclass(frozen=True, kw_only=True)
class RunFlags(PluginFlags):
    out: Path = Path("runs/train")
    """Folder of the run."""
    config: Path | None = None
    """TOML file with sections such as [model] and [train]; or another run, or its config.json. Flags
    override it."""
    resume: bool = False
    """Continue from the newest checkpoint, under the settings the run began with."""
    settings: dict = field(default_factory=dict, metadata=SETTINGS)


@dataclass(frozen=True, kw_only=True)
class CompareFlags(RunFlags):
    out: Path = Path("runs/compare")
    """Folder of the comparison."""
    residuals: tuple[str, ...] = field(default=(), metadata={"aliases": ("--arms",)})
    """Residuals to compare, the baseline first; `all` is every registered residual. Settings of the
    model may follow, as in standard+shortswa=4. With --resume, residuals to add. (default: standard
    attnres-block attnres-full)"""
    seeds: tuple[int, ...] = ()
    """Each residual is trained once per seed; equal seeds see equal tokens. With --resume, seeds to add.
    (default: 0 1 2)"""
    jobs: int = setting(1, least=1)
    """Runs at a time; the cores are shared among them."""


@dataclass(frozen=True, kw_only=True)
class ReportFlags(PluginFlags):
    folders: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Run folders, a folder of runs, of a comparison or of a study, or converted transformers folders."""
    out: Path | None = None
    """The file to write; by default report.html, or matrix.html, in the first folder."""
    prompt: str = "def add(a, b):\n    return a +"
    """Text that a model of transformers reads, because it has no records of training."""
    device: str = "cpu"
    """Device on which the model reads it."""


@dataclass(frozen=True, kw_only=True)
class ResidualsFlags(PluginFlags):
    residuals: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Names, with options if you like; all of them by default."""
    dim: int = setting(128, least=1)
    """Width of the model that the table is for."""
    layers: int = setting(12, least=1)
    """Layers of that model."""
    markdown: bool = False
    """Print a Markdown table."""
    check: bool = False
    """Check, on 4 layers of width 32, that they keep what every residual promises: for whoever writes a
    residual. Prints no table."""


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A run, or one of its checkpoints; or a transformers folder, such as headwater convert wrote."""
    prompt: tuple[str, ...] = ("def ",)
    """One or several texts, of any lengths, which are continued together."""
    max_new_tokens: int = 100
    """Tokens to add to each text."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8))
    stop: tuple[str, ...] = ()
    """Words that end a text."""
    stream: bool = False
    """Show the text as it comes."""
    prefill_chunk: int | Literal["auto"] = "auto"
    """Read prompts in portions of so many tokens, which takes less memory; auto: as many as the free
    memory is for."""
    seed: int = 0
    """Seed of the draw; with several prompts, the next numbers for the next prompts."""
    tensor: int = setting(1, least=1)
    """Ranks that share the work, as many as torchrun has started: each keeps a share of the tokens."""
    device: str = "cpu"
    """Device of the model."""


@dataclass(frozen=True, kw_only=True)
class InspectFlags(PluginFlags):
    models: tuple[Path, ...] = field(metadata=POSITIONAL)
    """A run, a checkpoint, an exported model or a converted transformers folder; or two of them, side by
    side."""
    prompt: str = "def add(a, b):\n    return a +"
    """Text that the model reads."""
    top: int = setting(5, least=1)
    """How many of the likeliest tokens to show."""
    removals: Literal["auto", "none", "sources", "pairs"] = "auto"
    """Sources to take away to see their effect: each source at all reads, or also at each read alone."""
    device: str = "cpu"
    """Device of the model."""
    out: Path = Path("inspect.html")
    """The page to write."""
    serve: bool = False
    """Serve the page with a prompt box, to this machine's browser alone, and write nothing."""
    port: int = 0
    """With --serve: port of 127.0.0.1; 0 takes one that is free."""


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A transformers checkpoint folder; or anything that headwater generate takes, such as a run."""
    out: Path
    """Folder to write; AutoModelForCausalLM loads it after `import headwater.hf`."""
    residual: str | None = None
    """The residual to convert to, attnres-block by default. A run keeps its own unless one is given."""
    layout: str | None = None
    """How a decoder layer's parts are called, for an architecture that is not known: JSON, or a file of
    it, with fields of headwater.hf.Layout, such as '{"mlp_norm": "pre_feedforward_layernorm"}'."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Write the weights in this dtype; by default they are linked, not written again."""
    device: str = "cpu"
    """Device on which the model is tried before and after."""
    check: Literal["auto", "yes", "no"] = "auto"
    """Load the model and try it before and after; auto: where it takes at most half of the free
    memory."""
    remote_code: bool = False
    """Add a modeling file, with which trust_remote_code=True loads the folder where headwater is not
    installed."""


@dataclass(frozen=True, kw_only=True)
class RevertFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A converted checkpoint folder."""
    out: Path
    """Folder to write: the plain model."""


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(PluginFlags):
    folders: tuple[Path, Path] = field(metadata=POSITIONAL)
    """Two transformers checkpoint folders."""
    tokens: int = 64
    """Random tokens per row."""
    seed: int = 0
    """Seed of the tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which both are loaded; by default what they are stored in."""
    device: str = "cpu"
    """Device of both models."""


@dataclass(frozen=True, kw_only=True)
class EvalFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
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
    """Questions at a time."""
    device: str = "cpu"
    """Device of the model."""
    unsafe_code: bool = False
    """Run the code that the model writes, as humaneval asks: on this machine, with your rights, nothing
    around it."""
    out: Path | None = None
    """The JSON file to write; by default eval.json in the folder."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(PluginFlags):
    config: Path | None = None
    """TOML file of the run; or another run, or its config.json. Flags override it."""
    world: int = setting(1, least=1)
    """Processes, one for each GPU."""
    memory: float = setting(80.0, above=0)
    """GiB on each of them."""
    gpu: bool = True
    """bf16 and fused reads, as on a GPU; otherwise fp32 and the reference operators."""
    settings: dict = field(default_factory=dict, metadata=SETTINGS)


@dataclass(frozen=True, kw_only=True)
class ExportFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A run, or one of its checkpoints, saved by any number of ranks."""
    out: Path
    """Folder for model.safetensors, config.json and tokenizer.json."""


@dataclass(frozen=True, kw_only=True)
class StudyFlags(PluginFlags):
    recipe: Path = field(metadata=POSITIONAL)
    """TOML file that names settings and lists of them."""
    out: Path | None = None
    """Folder of the study; by default runs/ and its name."""
    minutes: float | None = setting(None, least=0)
    """Start no run after them, and save those under way: the next call goes on. By default no limit."""
    whole: bool = False
    """Start no run that would not end by then, going by those that have, but a shorter run instead: for a
    machine whose disk is lost."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags(PluginFlags):
    folders: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Run folders, or a folder of runs, of a comparison or of a study."""
    baseline: str = "standard"
    """The residual whose compute the others are measured in."""
    lr: float | Literal["best"] | None = None
    """Take only the runs with this learning rate, where there are several; best: of each residual and
    size, the rate at which the mean loss is lowest."""
    out: Path | None = None
    """The plot; by default scaling.svg in the first folder."""


@dataclass(frozen=True, kw_only=True)
class DemoFlags(Section, section=""):
    out: Path = Path("runs/demo")
    """Folder of the comparison."""
    jobs: int = setting(2, least=1)
    """Runs at a time."""


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(Section, section=""):
    """No flags."""


def settings_of(flags: RunFlags | PlanFlags, saved: Path | None = None) -> Config:
    """Return the settings of a run: what it began with or the defaults, then its file, then its flags."""
    config = Config() if saved is None else load_file(saved)
    if flags.config is not None:
        config = load_file(flags.config, config)
    return config.over(flags.settings)
