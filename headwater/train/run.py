"""A run as a value: model, data, optimizers and counters, made from a configuration, or from a checkpoint of one."""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from headwater import __version__
from headwater.errors import SettingError, UserError, spell, user_values
from headwater.models import Decoder, ModelConfig
from headwater.models.sublayer import Sublayer
from headwater.residuals import located, pinned
from headwater.runs.files import read_json
from headwater.runs.results import DIVERGED, SUMMARY, TrainResult, code_of
from headwater.runs.settings import Config, flatten
from headwater.train.balance import Load
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint.saver import Saver
from headwater.train.data.dataset import SPLITS, Dataset, Windows, prepare
from headwater.train.data.tokenizer import Tokenizer, kept_tokenizer
from headwater.train.distributed import rendezvous as attempts
from headwater.train.distributed.fsdp import fill, shard
from headwater.train.distributed.parts import Parts
from headwater.train.distributed.pipeline import Pipeline, assemble
from headwater.train.distributed.ranks import Ranks, refuse_unequal
from headwater.train.distributed.stages import windows_per_micro
from headwater.train.distributed.tensor_parallel import bodies, parallelize, refuse_undivided
from headwater.train.files import refuse_others, write_json
from headwater.train.load import fill_from
from headwater.train.monitor.bad_steps import Skips, drop_causes
from headwater.train.monitor.metrics import START, MetricsLog, Mirror
from headwater.train.optim import build_optimizers

FRESH: dict[str, Any] = {
    "step": 0,
    "seconds": 0.0,
    "peak_memory": 0,
    "evaluation": {},
    "skips": {},
    "log": START,
}
LONG = 2000  # steps, in which a minute or two of compiling the whole model pays


@dataclass(kw_only=True)
class Run:
    config: Config
    folder: Path
    ranks: Ranks
    device: torch.device
    model: nn.Module
    """The part of the decoder that this rank holds: all of it when it is alone."""
    whole: Decoder
    """The decoder's shape, without weights where there are several ranks."""
    forward: Callable[[Tensor], Tensor]
    """The model, compiled if asked for."""
    hidden: Callable[[Tensor], Tensor]
    """The same without its output head."""
    on_device: bool
    """Alone on a GPU: a step never waits for the host."""
    compiled: str
    """The compiled part: none, layers or model."""
    pipeline: Pipeline | None
    optimizers: dict[str, torch.optim.Optimizer]
    train: Windows
    validation: Windows
    token_bytes: Tensor
    identity: dict[str, Any]
    """Facts that a checkpoint must agree with to continue this run."""
    log: MetricsLog | NoLog
    saver: Saver
    step: int
    seconds: float
    """Wall-clock of the processes before this one."""
    peak_memory: int
    evaluation: dict[str, float]
    skips: Skips
    planned: int | None = None
    """The steps of a run that was begun with others than it has now."""
    own_loss: float = 0.0
    """This rank's share of the last step's loss."""
    load: Load | None = None
    """Unevenness of the last step's loads of experts, where there are some."""
    began: float = field(default_factory=time.monotonic)
    code: str = field(default_factory=code_of)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def tokens(self) -> int:
        return self.tokens_at(self.step)

    def tokens_at(self, step: int) -> int:
        """Tokens seen up to a step."""
        return step * self.config.train.batch_size * self.train.context

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.began


class NoLog:
    """The metrics log of the ranks that do not write one."""

    mirrors: Sequence[Mirror] = ()

    def write(self, kind: str, step: int, **values: Any) -> None: ...

    def saved(self) -> dict[str, Any]:
        return {}

    def sync(self) -> None: ...

    def close(self) -> None: ...


def begin(config: Config, out: Path, *, resume: bool, ranks: Ranks | None = None) -> Run:
    """Everything in place for the next step: the one after the newest checkpoint when resuming, else the first."""
    # One rank decides for all: on a network file system they may see different things.
    ranks = ranks or Ranks()
    resume = admit(out, resume, ranks)

    # The main rank tokenises; the others find its cache. Only then is the vocabulary known.
    with ranks.main_first():
        data = prepare(kept_tokenizer(config.data, out) if resume else config.data)
    model_config = resolve_model(config.model, data)
    resolved = asdict(replace(config, model=model_config))
    identity = {**resolved, "corpus": data.identity}
    if not ranks.alone:
        refuse_unequal(what_counts(identity))
    train, validation = (data.windows(split, model_config.context) for split in SPLITS)

    # A checkpoint must be whole, and of this run.
    root, planned = out / "checkpoints", config.train.steps
    if ranks.main:
        checkpoint.sweep(root)
    latest = ranks.broadcast_object(checkpoint.newest(root) if resume else None)
    if latest:
        checkpoint.verify(latest, ranks)
        planned = planned_steps(latest, config)
        as_planned = {**identity["train"], "steps": planned}
        checkpoint.refuse_other(latest, {**identity, "train": as_planned})

    # Weights are drawn on the main rank, then moved or divided, then filled from a checkpoint.
    device = choose_device(config)
    whole = build_model(model_config, config.train.seed, meta=not ranks.main)
    if config.train.init_from and not latest:
        ranks.on_main(lambda: fill_from(whole, data.tokenizer, config.train.init_from))
    model: Decoder | Parts
    if ranks.alone:
        model, pipeline = whole.to(device), None
        forward, hidden = wrap(whole, config, device)
    else:
        model, pipeline = distribute(whole, config, ranks, device)
        forward, hidden = model, whole.hidden
    on_device = ranks.alone and device.type == "cuda"
    optimizers = build_optimizers(model, config.optim, on_device=on_device)
    state = checkpoint.load(latest, model, optimizers, ranks) if latest else dict(FRESH)

    ranks.barrier()  # until everyone has looked, nothing in the folder changes
    if ranks.main and state["step"] < config.train.steps:  # a finished run stays as it is
        write_beginning(out, resolved, data.tokenizer, state["step"])
    saved_config = replace(model_config, residual=pinned(whole.residual))
    shape = whole
    if not ranks.alone:
        shape = build_model(model_config, config.train.seed, meta=True)
    run = Run(
        config=config,
        folder=out,
        ranks=ranks,
        device=device,
        model=model,
        whole=shape,
        forward=forward,
        hidden=hidden,
        on_device=on_device,
        compiled=compile_mode(config, whole, device if ranks.alone else None),
        pipeline=pipeline,
        optimizers=optimizers,
        train=train,
        validation=validation,
        token_bytes=torch.from_numpy(data.tokenizer.token_bytes),
        identity=identity,
        log=open_log(out, state) if ranks.main else NoLog(),
        saver=Saver(root, model, optimizers, saved_config, ranks),
        step=state["step"],
        seconds=state["seconds"],
        peak_memory=state["peak_memory"],
        evaluation=state["evaluation"],
        skips=Skips(**state["skips"]),
    )
    if planned != config.train.steps:
        steps = config.train.steps
        run.log.write("extend", run.step, tokens=run.tokens, planned=planned, steps=steps)
        run.planned = planned
    return run


def write_beginning(out: Path, settings: dict[str, Any], tokenizer: Tokenizer, step: int) -> None:
    """Write what a run is, and remove what it came to if it had ended before and is to go further."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", settings)
    tokenizer.save(out)
    for result in (SUMMARY, DIVERGED):
        (out / result).unlink(missing_ok=True)
    drop_causes(out, after=step)


def what_counts(identity: dict[str, Any]) -> dict[str, Any]:
    """All that must be equal on ranks of one run: settings, tokens, the code of headwater and the release of torch.

    Where a rank finds the text, which device it has and what it logs to are its own affair.
    """
    # Settings and hashes of text by dotted name.
    values = {
        key: value
        for key, value in flatten(identity).items()
        if not key.startswith(("data.", "log.")) and key != "train.device"
    }
    return {**values, "code of headwater": code_of(), "torch": str(torch.__version__)}


def open_log(out: Path, state: dict[str, Any]) -> MetricsLog:
    return MetricsLog(out / "metrics.jsonl", step=state["step"], saved=state["log"])


def planned_steps(latest: Path, config: Config) -> int:
    """Read how many steps the run of this checkpoint was to take. The run may now be asked for more, or for fewer."""
    state = checkpoint.read_state(latest)
    if config.train.steps < state["step"]:
        must = f"must be at least {state['step']}, the step of {latest}"
        raise SettingError("train.steps", must, config.train.steps)
    return state["config"]["train"]["steps"]


def admit(out: Path, resume: bool, ranks: Ranks) -> bool:
    """Decide on the main rank whether the run in this folder goes on, for all ranks.

    Raises: `UserError` on all ranks for a folder that holds something else.
    """

    def decide() -> bool:
        launch = attempts.launch()
        goes_on = resume or attempts.began(out, launch)
        problem = obstacle(out, goes_on)
        if problem:
            raise UserError(f"{problem}, or choose another {spell('out')}")
        attempts.claim(out, launch)
        return goes_on

    return ranks.on_main(decide)


def obstacle(out: Path, goes_on: bool) -> str:
    """Say why no run may begin, or go on, in this folder, and what to do; empty if one may."""
    if not (out / "config.json").exists():
        if not goes_on:
            refuse_others(out, "a run")
        return ""
    # A folder with another program's config.json is not ours to write to.
    settings = read_json(out / "config.json")
    if not (isinstance(settings, dict) and {"model", "train"} <= settings.keys()):
        return f"{out} holds something else (its config.json is not a run's): move it"
    if (out / SUMMARY).exists() and not checkpoint.checkpoints(out / "checkpoints"):
        # Taken further, the run would lose its result and its metrics.
        return (
            f"{out} holds a finished run without its weights, which cannot go on: read summary.json"
        )
    if not goes_on:
        return f"{out} already holds a run: continue it with {spell('resume')}"
    return ""


def resolve_model(model: ModelConfig, data: Dataset) -> ModelConfig:
    return with_vocabulary(model, data.tokenizer.vocab_size)


def with_vocabulary(model: ModelConfig, words: int) -> ModelConfig:
    """Fill in the vocabulary, unless it is set, and the module that registers the residual."""
    # Matrix units like multiples of 64.
    size = model.vocab_size or -(-words // 64) * 64
    if size < words:
        raise SettingError(
            "model.vocab_size", f"must be at least {words}, as the tokenizer has", size
        )
    with user_values():
        return replace(model, vocab_size=size, residual=located(model.residual))


def build_model(config: ModelConfig, seed: int, *, meta: bool = False) -> Decoder:
    """The decoder at its start; on the meta device its shape alone."""
    # Weights are a function of the seed alone, on any number of ranks.
    torch.manual_seed(seed)
    with user_values(), torch.device("meta") if meta else nullcontext():
        return Decoder(config)


def choose_device(config: Config) -> torch.device:
    name = config.train.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # A device is tried out before any work: it may be named and not be there.
    try:
        device = torch.device(name)
        # Set by torchrun: one GPU each
        if device == torch.device("cuda") and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # where kernels are launched and streams are made
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used here: {reason}") from None
    # Sums in another order would give other bits: resuming is bitwise because of this.
    if device.type == "cuda" and config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a launch a tensor
    return device


def distribute(
    whole: Decoder, config: Config, ranks: Ranks, device: torch.device
) -> tuple[Decoder | Parts, Pipeline | None]:
    """This rank's part of the decoder. It is never whole on any rank but the main one, which draws the start."""
    pipeline = None
    model: Decoder | Parts
    windows = windows_per_micro(config, ranks.data_world)
    recompute = config.train.checkpoint_activations
    if ranks.tensor > 1:
        refuse_undivided(whole.config, ranks.tensor, ranks.shards)
    if config.parallel.pipeline == 1:
        # In torchtitan's order: tensor parallelism, recomputation, compilation, FSDP2.
        with torch.device("meta"):
            model = Decoder(whole.config)
        if ranks.tensor > 1:
            parallelize(model, cast(DeviceMesh, ranks.mesh)["tensor"])
        prepare_part(model, config)
        shard(model, cast(list[Sublayer], model.sublayers), ranks, recompute=recompute)
        model.to_empty(device=device)
    else:
        model, pipeline = assemble(
            whole.config,
            config.parallel,
            ranks,
            device,
            micros=config.train.accumulate,
            windows=windows,
            recompute=recompute,
            prepare=lambda part: prepare_part(part, config),
        )
    # Only now do weights arrive, each rank's part of them.
    fill(model, whole if ranks.main else None)
    return model, pipeline


Forward = Callable[[Tensor], Tensor]


def wrap(model: Decoder, config: Config, device: torch.device) -> tuple[Forward, Forward]:
    """Apply recomputation and compilation from outside, in this order; the model knows of neither.

    Returns the model, and the model without its head.
    """
    recompute_activations(model, config)
    mode = compile_mode(config, model, device)
    if mode == "layers":
        model.compile_layers(dynamic=False)
    if mode == "model":
        return torch.compile(model), torch.compile(model.hidden)
    return model, model.hidden


def prepare_part(model: Decoder, config: Config) -> None:
    """Apply both among ranks, before FSDP2 wraps the bodies.

    Each attention and MLP is compiled by itself: a graph over all of them would break at the hooks that fetch weights,
    and at every hop of a pipeline.
    """
    recompute_activations(model, config)
    if compile_mode(config, model, None) != "none":
        for body in bodies(model):
            body.compile()


def recompute_activations(model: Decoder, config: Config) -> None:
    if config.train.checkpoint_activations:  # nothing in a decoder draws random numbers
        model.around = functools.partial(
            checkpoint_activations, use_reentrant=False, preserve_rng_state=False
        )


def compile_mode(config: Config, model: Decoder, device: torch.device | None) -> str:
    """none, layers or model; `device` is None among ranks."""
    # Whoever names a mode gets it.
    mode = config.train.compile
    if mode != "auto":
        return mode
    # Compiling the model pays where a residual has no kernels and the run is long.
    if device is None or device.type != "cuda":
        return "none"
    return "layers" if model.residual.fused or config.train.steps < LONG else "model"


def save(run: Run) -> Path:
    """A checkpoint of this step; the metrics that it vouches for reach the disk first."""
    run.peak_memory = max(run.peak_memory, peak_memory(run.device))
    # All that a run needs to go on as if nothing had been.
    state = {
        "config": run.identity,
        "tokens": run.tokens,
        "seconds": run.elapsed(),
        "peak_memory": run.peak_memory,
        "evaluation": run.evaluation,
        "skips": asdict(run.skips),
        "log": run.log.saved(),
    }
    settings = run.config.train
    return run.saver.save(
        run.step, state, keep=settings.keep, before=run.log.sync, background=settings.async_save
    )


def finish(run: Run) -> TrainResult:
    """Write and return what the run came to; its last checkpoint is already in place."""
    # Numbers of the whole model, which no rank may hold.
    parameters = run.whole.parameter_count()
    on_gpu = run.device.type == "cuda"
    corpus = run.identity["corpus"]
    result = TrainResult(
        folder=run.folder,
        residual=run.whole.config.residual,
        seed=run.config.train.seed,
        parameters=parameters["total"],
        residual_parameters=parameters["residual"],
        flops_per_token=run.whole.flops_per_token(run.train.context),
        tokens=run.tokens,
        steps=run.step,
        skipped_steps=run.skips.total,
        seconds=run.elapsed(),
        peak_memory_bytes=run.ranks.max(max(run.peak_memory, peak_memory(run.device))),
        **run.evaluation,
        device=torch.cuda.get_device_name(run.device) if on_gpu else run.device.type,
        torch=str(torch.__version__),
        headwater=__version__,
        code=run.code,
        source_hash=corpus["source_hash"],
        tokenizer_hash=corpus["tokenizer_hash"],
    )
    # This file says that the run has ended.
    if run.ranks.main:
        write_json(run.folder / SUMMARY, result.summary())
    return result


def peak_memory(device: torch.device) -> int:
    """Bytes at the worst moment of this process: on the GPU what torch allocated, else resident memory.

    /proc is asked first because getrusage lets a process inherit the peak of the one that started it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
