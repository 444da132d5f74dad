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

# Deep and narrow, so that how depth is connected matters; chosen and confirmed in studies/demo-pair.
# The queries learn at the whole rate, not at a tenth as by default, so that they move in a run this
# short.
DEMO: dict[str, Any] = {
    "residuals": ("standard", "attnres-block"),
    "seeds": (0, 1, 2, 3, 4),
    "config": Config(
        model=ModelConfig.named("deep", dim=32, mlp_dim=96, context=64),
        optim=OptimSettings(lr=1e-2, warmup=20, query_lr=1.0),
        train=TrainSettings(
            steps=300,
            batch_size=8,
            eval_every=75,
            eval_windows=128,
            depth_every=75,
            save_every=300,
            keep=1,
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class PluginFlags(Section, section=""):
    plugin: tuple[str, ...] = ()
    """Python module that registers your residuals. Repeat the flag for several modules.
    Installed packages need none."""


@dataclass(frozen=True, kw_only=True)
class RunFlags(PluginFlags):
    out: Path = Path("runs/train")
    """Folder of the run."""
    config: Path | None = None
    """TOML file with sections such as [model] and [train], or another run or its config.json.
    Flags override it."""
    resume: bool = False
    """Continue from the newest checkpoint, under the settings that the run began with."""
    settings: dict = field(default_factory=dict, metadata=SETTINGS)


@dataclass(frozen=True, kw_only=True)
class CompareFlags(RunFlags):
    out: Path = Path("runs/compare")
    """Folder of the comparison."""
    residuals: tuple[str, ...] = field(default=(), metadata={"aliases": ("--arms",)})
    """Residuals to compare, the baseline first, or all for every registered one. A setting of
    the model may follow a plus sign, as in standard+shortswa=4. With --resume, residuals to
    add. (default: standard attnres-block attnres-full)"""
    seeds: tuple[int, ...] = ()
    """Random seeds. Each residual is trained once per seed, and equal seeds see equal tokens.
    With --resume, seeds to add. (default: 0 1 2)"""
    jobs: int = setting(1, least=1)
    """Number of runs at a time, which share the cores."""


@dataclass(frozen=True, kw_only=True)
class ReportFlags(PluginFlags):
    folders: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Run folders, a folder of runs, of a comparison or of a study, or converted transformers
    folders."""
    out: Path | None = None
    """File to write. Without it report.html in the first folder."""
    prompt: str = "def add(a, b):\n    return a +"
    """Text that transformers models read, which have no records of training."""
    device: str = "cpu"
    """Device on which transformers models read the text."""


@dataclass(frozen=True, kw_only=True)
class ResidualsFlags(PluginFlags):
    residuals: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Residuals to print, with options if you like. Without names all of them."""
    dim: int = setting(128, least=1)
    """Width of the model that the table is for, in channels."""
    layers: int = setting(12, least=1)
    """Number of layers of the model that the table is for."""
    markdown: bool = False
    """Print a Markdown table."""
    check: bool = False
    """Check that residuals keep what every residual promises, on 4 layers of width 32, instead
    of printing a table. For whoever writes a residual."""


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A run, one of its checkpoints, `demo`, which comes with headwater, or a transformers folder,
    such as one that headwater convert wrote."""
    prompt: tuple[str, ...] = ("def push(self, item):",)
    """Texts to continue, one or several, of any lengths."""
    max_new_tokens: int = 100
    """Number of tokens to add to each text, at least 0."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8))
    stop: tuple[str, ...] = ()
    """Words that end a text."""
    stream: bool = False
    """Show the text as it comes."""
    prefill_chunk: int | Literal["auto"] = "auto"
    """Number of prompt tokens to read at a time; fewer take less memory. auto takes as many as
    the free memory is for."""
    seed: int = 0
    """Random seed of the draw. With several prompts, prompt r uses seed + r."""
    tensor: int = setting(1, least=1)
    """Number of ranks that share the work, as many as torchrun has started. Each rank keeps a
    share of the tokens."""
    device: str = "cpu"
    """Device of the model."""


@dataclass(frozen=True, kw_only=True)
class InspectFlags(PluginFlags):
    models: tuple[Path, ...] = field(metadata=POSITIONAL)
    """A run, a checkpoint, an exported model or a converted transformers folder, or two of them
    to see side by side; `demo` is the two trained models that come with headwater."""
    prompt: str = "def push(self, item):\n    self.items.append(item)"
    """Text that the model reads."""
    top: int = setting(5, least=1)
    """Number of likeliest tokens to show."""
    removals: Literal["auto", "none", "sources", "pairs"] = "auto"
    """Sources to take away to see their effect: sources takes each source away at all reads,
    pairs also at each read alone. auto takes pairs if they need about a minute."""
    device: str = "cpu"
    """Device of the model."""
    out: Path = Path("inspect.html")
    """Page to write."""
    serve: bool = False
    """Serve the page with a prompt box to this machine's browser, and write no file."""
    port: int = 0
    """Port of --serve on 127.0.0.1. 0 picks a free one."""


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A transformers checkpoint folder, or anything that headwater generate takes, such as a
    run."""
    out: Path
    """Folder to write. AutoModelForCausalLM loads it after import headwater.hf."""
    residual: str | None = None
    """Residual to convert to. Without it attnres-block, and for a run its own."""
    layout: str | None = None
    """Names of a decoder layer's parts, for an architecture that headwater does not know: JSON,
    or a JSON file, with fields of headwater.hf.Layout, such as '{"mlp_norm":
    "pre_feedforward_layernorm"}'."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the written weights. Without it the weights are linked, not written again."""
    device: str = "cpu"
    """Device on which the model is tried before and after."""
    check: Literal["auto", "yes", "no"] = "auto"
    """Load the model and try it before and after. auto does so if that takes at most half of the
    free memory."""
    remote_code: bool = False
    """Add a modeling file, with which trust_remote_code=True loads the folder where headwater is
    not installed."""


@dataclass(frozen=True, kw_only=True)
class RevertFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A converted checkpoint folder."""
    out: Path
    """Folder to write, for the plain model."""


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(PluginFlags):
    folders: tuple[Path, Path] = field(metadata=POSITIONAL)
    """Two transformers checkpoint folders."""
    tokens: int = 64
    """Number of random tokens per row."""
    seed: int = 0
    """Random seed of the tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which both models are loaded. auto takes the dtype in which they are stored."""
    device: str = "cpu"
    """Device of both models."""


@dataclass(frozen=True, kw_only=True)
class ServeCheckFlags(Section, section=""):
    folder: Path = field(metadata=POSITIONAL)
    """A checkpoint folder of transformers. Its modeling file is run if vLLM is installed."""


@dataclass(frozen=True, kw_only=True)
class EvalFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A run, one of its checkpoints, or a transformers checkpoint folder, converted or not."""
    tasks: tuple[str, ...]
    """Names of lm-eval's tasks, groups or tags, with spaces or commas between them."""
    include_path: Path | None = None
    """Folder with YAML files of your own tasks."""
    fewshot: int | None = None
    """Number of solved examples before each question. Without it as many as the task says."""
    limit: int | None = None
    """Number of questions to score of each task. Without it all of them."""
    batch_size: int = 8
    """Number of questions at a time."""
    device: str = "cpu"
    """Device of the model."""
    unsafe_code: bool = False
    """Run the code that the model writes, as humaneval asks: on this machine, with your rights,
    without a sandbox."""
    out: Path | None = None
    """JSON file to write. Without it eval.json in the folder."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(PluginFlags):
    config: Path | None = None
    """TOML file of the run, or another run or its config.json. Flags override it."""
    world: int = setting(1, least=1)
    """Number of processes, one per GPU."""
    memory: float = setting(80.0, above=0)
    """Memory of each GPU, in GiB."""
    gpu: bool = True
    """Plan for bf16 and fused reads, as on a GPU. Otherwise for fp32 and the reference
    operators."""
    settings: dict = field(default_factory=dict, metadata=SETTINGS)


@dataclass(frozen=True, kw_only=True)
class ExportFlags(PluginFlags):
    folder: Path = field(metadata=POSITIONAL)
    """A run, or one of its checkpoints, saved by any number of ranks."""
    out: Path
    """Folder to write, for model.safetensors, config.json and tokenizer.json."""


@dataclass(frozen=True, kw_only=True)
class StudyFlags(PluginFlags):
    recipe: Path = field(metadata=POSITIONAL)
    """TOML file that names settings and lists of settings."""
    out: Path | None = None
    """Folder of the study. Without it runs/ and the name of the study."""
    minutes: float | None = setting(None, least=0)
    """Number of minutes after which no run is started and running ones are saved, so that the
    next call goes on. Without it there is no limit."""
    whole: bool = False
    """Start only runs that should finish within --minutes, judging by finished ones, and take a
    shorter run if need be. For machines that lose their disk."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags(PluginFlags):
    folders: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Run folders, or a folder of runs, of a comparison or of a study."""
    baseline: str = "standard"
    """Residual whose compute the others are measured in."""
    lr: float | Literal["best"] | None = None
    """Learning rate of the runs to use, where several were tried. best takes, for each residual
    and size, the rate with the lowest mean loss."""
    out: Path | None = None
    """SVG plot to write. Without it scaling.svg in the first folder."""


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
    """Return the settings of a run: those it began with or the defaults, its file, its flags."""
    config = Config() if saved is None else load_file(saved)
    if flags.config is not None:
        config = load_file(flags.config, config)
    return config.over(flags.settings)
