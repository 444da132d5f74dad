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
from torch.utils.checkpoint import checkpoint as recompute

from headwater import __version__
from headwater.errors import SettingError, UserError, spell, user_values
from headwater.models import Decoder, ModelConfig
from headwater.models.sublayer import Sublayer
from headwater.residuals import located, pinned
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
from headwater.train.files import read_json, refuse_others, write_json
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
    """What this rank holds of the decoder: all of it when it is alone."""
    whole: Decoder
    """The decoder's shape, without weights where there are several ranks."""
    forward: Callable[[Tensor], Tensor]
    """The model, compiled if asked for."""
    hidden: Callable[[Tensor], Tensor]
    """The same without its output head."""
    on_device: bool
    """Alone on a GPU: a step never waits for the host."""
    compiled: str
    """What is compiled: none, layers or model."""
    pipeline: Pipeline | None
    optimizers: dict[str, torch.optim.Optimizer]
    train: Windows
    validation: Windows
    token_bytes: Tensor
    identity: dict[str, Any]
    """What a checkpoint must agree with to continue this run."""
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
    """How uneven the last step's loads of experts were, where there are some."""
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
    ranks = ranks or Ranks()
    resume = admit(out, resume, ranks)
    with ranks.main_first():
        data = prepare(kept_tokenizer(config.data, out) if resume else config.data)
    model_config = resolve_model(config.model, data)
    resolved = asdict(replace(config, model=model_config))
    identity = {**resolved, "corpus": data.identity}
    if not ranks.alone:
        refuse_unequal(what_counts(identity))
    train, validation = (data.windows(split, model_config.context) for split in SPLITS)
    root, planned = out / "checkpoints", config.train.steps
    if ranks.main:
        checkpoint.sweep(root)
    latest = ranks.broadcast_object(checkpoint.newest(root) if ranks.main and resume else None)
    if latest:
        checkpoint.verify(latest, ranks)
        planned = planned_steps(latest, config)
        checkpoint.refuse_other(
            latest, {**identity, "train": {**identity["train"], "steps": planned}}
        )
    device = choose_device(config)
    whole = build_model(model_config, config.train.seed, meta=not ranks.main)
    if config.train.init_from and not latest:
        begin_with(whole, data.tokenizer, config.train.init_from, ranks)
    model: Decoder | Parts
    if ranks.alone:
        model, pipeline = whole.to(device), None
        forward, hidden = wrap(whole, config, device)
    else:
        model, pipeline = distribute(whole, config, ranks, device)
        forward, hidden = model, whole.hidden
    on_device = ranks.alone and device.type == "cuda"
    optimizers = build_optimizers(model, config.optim, on_device=on_device)
    saved = replace(model_config, residual=pinned(whole.residual))
    state = checkpoint.load(latest, model, optimizers, ranks) if latest else dict(FRESH)
    ranks.barrier()  # until everyone has looked, nothing in the folder changes
    if ranks.main and state["step"] < config.train.steps:  # a finished run stays as it is
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", resolved)
        data.tokenizer.save(out)
        for ended in (SUMMARY, DIVERGED):  # of a run that had ended and is to go further
            (out / ended).unlink(missing_ok=True)
        drop_causes(out, after=state["step"])
    run = Run(
        config=config,
        folder=out,
        ranks=ranks,
        device=device,
        model=model,
        whole=whole if ranks.alone else build_model(model_config, config.train.seed, meta=True),
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
        saver=Saver(root, model, optimizers, saved, ranks),
        step=state["step"],
        seconds=state["seconds"],
        peak_memory=state["peak_memory"],
        evaluation=state["evaluation"],
        skips=Skips(**state["skips"]),
    )
    if planned != config.train.steps:
        run.log.write(
            "extend", run.step, tokens=run.tokens, planned=planned, steps=config.train.steps
        )
        run.planned = planned
    return run


def what_counts(identity: dict[str, Any]) -> dict[str, Any]:
    """All that must be equal on ranks of one run: settings, tokens, the code of headwater and the release of torch.

    Where a rank finds the text, which device it has and what it logs to are its own affair.
    """
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
        raise UserError(
            f"{latest} is of step {state['step']}: {spell('train.steps')} must be at least that, "
            f"got {config.train.steps}"
        )
    return state["config"]["train"]["steps"]


def begin_with(model: Decoder, tokenizer: Tokenizer, folder: str, ranks: Ranks) -> None:
    """Weights of a trained model for the main rank's, from which the others have theirs."""
    problem = None
    try:
        if ranks.main:
            fill_from(model, tokenizer, folder)
    except UserError as error:
        problem = str(error)
    if problem := ranks.broadcast_object(problem):
        raise UserError(problem)


def admit(out: Path, resume: bool, ranks: Ranks) -> bool:
    """Decide on the main rank whether the run in this folder goes on, for all ranks.

    Raises: `UserError` on all ranks for a folder that holds something else.
    """
    launch = attempts.launch() if ranks.main else ""
    goes_on = ranks.broadcast_object(resume or attempts.began(out, launch))
    problem = ranks.broadcast_object(obstacle(out, goes_on) if ranks.main else None)
    if problem:
        raise UserError(problem)
    if ranks.main:
        attempts.claim(out, launch)
    return goes_on


def obstacle(out: Path, goes_on: bool) -> str | None:
    """Why no run may begin, or go on, in this folder."""
    try:
        if not (out / "config.json").exists():
            if not goes_on:
                refuse_others(out, "a run")
            return None
        settings = read_json(out / "config.json")
    except UserError as error:
        return str(error)
    if not (isinstance(settings, dict) and {"model", "train"} <= settings.keys()):
        return f"{out} holds something else (its config.json is not a run's): choose another {spell('out')}"
    if (out / SUMMARY).exists() and not checkpoint.checkpoints(out / "checkpoints"):
        return (
            f"{out} holds a finished run without its weights, as a study leaves it unless its file says keep_weights = "
            f"true, and cannot go on: its result is in summary.json; choose another {spell('out')}"
        )
    return (
        None
        if goes_on
        else f"{out} already holds a run: continue it with {spell('resume')}, or choose another {spell('out')}"
    )


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
    torch.manual_seed(seed)
    with user_values(), torch.device("meta") if meta else nullcontext():
        return Decoder(config)


def choose_device(config: Config) -> torch.device:
    name = config.train.device
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
        if (
            device == torch.device("cuda") and "LOCAL_RANK" in os.environ
        ):  # set by torchrun: one GPU each
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # where kernels are launched and streams are made
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from None
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
    if ranks.tensor > 1:
        refuse_undivided(whole.config, ranks.tensor, ranks.shards)
    if config.parallel.pipeline == 1:
        with torch.device("meta"):
            model = Decoder(whole.config)
        if ranks.tensor > 1:
            parallelize(model, cast(DeviceMesh, ranks.mesh)["tensor"])
        prepare_part(model, config)
        shard(
            model,
            cast(list[Sublayer], model.sublayers),
            ranks,
            recompute=config.train.checkpoint_activations,
        )
        model.to_empty(device=device)
    else:
        model, pipeline = assemble(
            whole.config,
            config.parallel,
            ranks,
            device,
            micros=config.train.accumulate,
            windows=windows,
            recompute=config.train.checkpoint_activations,
            prepare=lambda part: prepare_part(part, config),
        )
    fill(model, whole if ranks.main else None)
    return model, pipeline


Forward = Callable[[Tensor], Tensor]


def wrap(model: Decoder, config: Config, device: torch.device) -> tuple[Forward, Forward]:
    """Recomputation and compilation are applied from outside, in this order; the model knows of neither. Returns the
    model, and the model without its head."""
    recompute_activations(model, config)
    mode = compile_mode(config, model, device)
    if mode == "layers":
        model.compile_layers(dynamic=False)
    if mode == "model":
        return torch.compile(model), torch.compile(model.hidden)
    return model, model.hidden


def prepare_part(model: Decoder, config: Config) -> None:
    """Among ranks each attention and MLP is compiled by itself, before FSDP2 wraps it: a graph over all of them would
    break at the hooks that fetch weights, and at every hop of a pipeline."""
    recompute_activations(model, config)
    if compile_mode(config, model, None) != "none":
        for body in bodies(model):
            body.compile()


def recompute_activations(model: Decoder, config: Config) -> None:
    if config.train.checkpoint_activations:  # nothing in a decoder draws random numbers
        model.around = functools.partial(recompute, use_reentrant=False, preserve_rng_state=False)


def compile_mode(config: Config, model: Decoder, device: torch.device | None) -> str:
    """none, layers or model; `device` is None among ranks."""
    mode = config.train.compile
    if mode != "auto":
        return mode
    if device is None or device.type != "cuda":
        return "none"
    return "layers" if model.residual.fused or config.train.steps < LONG else "model"


def save(run: Run) -> Path:
    """A checkpoint of this step; the metrics that it vouches for reach the disk first."""
    run.peak_memory = max(run.peak_memory, peak_memory(run.device))
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
    parameters = run.whole.parameter_count()
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
        device=torch.cuda.get_device_name(run.device)
        if run.device.type == "cuda"
        else run.device.type,
        torch=str(torch.__version__),
        headwater=__version__,
        code=run.code,
        source_hash=run.identity["corpus"]["source_hash"],
        tokenizer_hash=run.identity["corpus"]["tokenizer_hash"],
    )
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
