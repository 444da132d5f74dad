"""One process equals many: the same losses and gradients under every layout, and the bytes that were derived."""

import functools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import precise, spawn
from safetensors.torch import load_file, save_file
from tinyrun import changed, tiny

from headwater.models import Decoder, ModelConfig
from headwater.runs.files import read_json
from headwater.runs.settings import Config, ParallelSettings
from headwater.stages import States
from headwater.train.checkpoint.folder import load_model
from headwater.train.distributed import pipeline
from headwater.train.distributed.fsdp import clip, fetched_together, gather
from headwater.train.distributed.ranks import Ranks, join
from headwater.train.loop import accumulate, depth_gradients, evaluate, update
from headwater.train.run import Run, begin, save

BLOCK = "attnres-block:block=3"
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "shard": {},
        "replicate": {"shard": 1},
        "pipeline": {"pipeline": 2},
        "gpipe": {"pipeline": 2, "pipeline_schedule": "gpipe"},
        "interleaved": {"pipeline": 2, "chunks": 2},
        "interleaved-4": {"pipeline": 2, "chunks": 4},
        "looped": {"pipeline": 2, "chunks": 2, "pipeline_schedule": "gpipe"},
        # No cut falls between two blocks of three
        "uneven": {"pipeline": 2, "chunks": 2, "cuts": (1, 4, 7)},
        "tensor": {"tensor": 2},
    },
    4: {
        "replicate-shard": {"shard": 2},
        "interleaved-wide": {"pipeline": 4, "chunks": 2},
        "interleaved-shard": {"pipeline": 2, "chunks": 2},
        "pipeline-replicate": {"pipeline": 2, "shard": 1},
        "tensor-shard": {"tensor": 2},
        "tensor-replicate": {"tensor": 2, "shard": 1},
        "tensor-pipeline": {"tensor": 2, "pipeline": 2, "chunks": 2},
    },
}
STEPS = 8  # of the layouts in LONG; the others take one
LONG = ("shard", "pipeline", "interleaved", "tensor")


@dataclass(frozen=True)
class Case:
    world: int
    residual: str
    layout: str
    cache: bool = True
    compile: bool = False
    recompute: bool = False
    muon: str = ""
    """Else AdamW: Muon, with its iteration in bf16, as it is, or in fp32, to be compared."""

    def __str__(self) -> str:
        compiled = " compiled" * self.compile + " recomputed" * self.recompute
        muon = f" muon {self.muon}" if self.muon else ""
        return f"{self.residual.replace(':', '-')} {self.layout} {'cache' if self.cache else 'plain'}{compiled}{muon}"

    @property
    def layers(self) -> int:
        """Muon gets three: three or six matrices of each shape, which four ranks do not share evenly.

        Where nothing is pipelined, two layers show what four do, in half the time.
        """
        if self.muon:
            return 3
        return 4 if "pipeline" in LAYOUTS[self.world][self.layout] else 2

    @property
    def steps(self) -> int:
        if self.muon == "fp32":
            return 3
        plain = not (self.muon or self.compile or self.recompute)
        return STEPS if plain and self.residual == BLOCK and self.layout in LONG else 1


# Every layout once, every kind of state once under a layout that divides it, and every option under two layouts.
# test_stages.py has every residual under uneven cuts, in one process. Cases of Muon show what AdamW does too, since
# embeddings and norms have AdamW.
CASES = [
    *(Case(2, BLOCK, layout) for layout in LAYOUTS[2]),
    *(Case(4, BLOCK, layout) for layout in ("interleaved-wide", "interleaved-shard")),
    *(Case(4, BLOCK, layout) for layout in ("pipeline-replicate", "tensor-pipeline")),
    Case(4, BLOCK, "tensor-replicate", muon="fp32"),
    Case(4, BLOCK, "replicate-shard", muon="fp32"),
    Case(4, BLOCK, "interleaved-shard", muon="fp32"),
    Case(4, BLOCK, "tensor-shard", muon="fp32"),
    Case(2, BLOCK, "shard", muon="bf16"),
    Case(2, BLOCK, "uneven", cache=False),
    Case(4, BLOCK, "interleaved-wide", cache=False),
    Case(2, BLOCK, "uneven", compile=True, recompute=True),
    Case(2, BLOCK, "tensor", compile=True, recompute=True),
    Case(2, "standard", "shard"),
    Case(2, "standard", "tensor"),
    Case(2, "attnres-full", "tensor"),
    Case(2, "hyper-connections", "uneven"),
    Case(2, "hyper-connections", "uneven", cache=False),
    Case(2, "hyper-connections", "shard", recompute=True),
    Case(2, "denseformer", "shard"),
    Case(2, "ddl", "tensor"),
    Case(2, "mhc", "tensor"),
    Case(2, "muddformer", "tensor"),
]
OF_MUON = [case for case in CASES if case.muon]
OF_TENSOR = [case for case in CASES if "tensor" in case.layout and case.residual == BLOCK]


def settings(folder: Path, residual: str) -> Config:
    shape = {"context": 8, "heads": 4, "kv_heads": 2, "qk_norm": True}
    return tiny(folder, residual=residual, batch_size=16, accumulate=4, steps=STEPS, **shape)


def settings_of(case: Case, config: Config, **layout: Any) -> Config:
    """Two micro-batches show what four do, in half the time, but for a pipeline by itself."""
    return changed(
        config,
        residual=case.residual,
        layers=case.layers,
        optimizer="muon" if case.muon else "adamw",
        compile="model" if case.compile else "none",
        checkpoint_activations=case.recompute,
        accumulate=4 if layout.get("pipeline") == case.world else 2,
        **layout,
    )


def follow(run: Run, steps: int) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and the evaluation after them."""
    losses, norms = [], []
    for number in range(1, steps + 1):
        losses.append(accumulate(run, number))
        norms.append(update(run, number, losses[-1])[0])
        run.step = number
    return {"losses": losses, "norms": norms, "bits": evaluate(run)}


def measure(run: Run) -> dict[str, Any]:
    """The norm of the gradients, the norm of each sublayer, and the norm after clipping to half of it."""
    norm, depth = run.ranks.gradient_norm(run.model), depth_gradients(run)
    clip(run.model, norm, norm / 2)
    return {"norm": norm, "depth": depth, "clipped": run.ranks.gradient_norm(run.model)}


def one_case(config: Config, out: Path, steps: int) -> None:
    ranks = grid(config.parallel.pipeline, config.parallel.tensor, config.parallel.shard)
    run = begin(config, out, resume=False, ranks=ranks)
    values: dict[str, Any] = {"loss": accumulate(run, 1)}
    gradients = gather(run.model, run.whole, ranks, gradients=True)
    values |= measure(run)
    if run.pipeline is not None:
        counted = [(s.stage_index, s.forward_bytes, s.backward_bytes) for s in run.pipeline.stages]
        everyone = ranks.all_gather_object(counted if ranks.data_rank == 0 else [])
        values["bytes"] = [hop for hops_of_rank in everyone for hop in hops_of_rank]
        cache = run.pipeline.stages[0].submod.port.cache
        values["left"] = sum(ranks.all_gather_object(len(cache.tensors) + len(cache.deposits)))
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    values |= follow(run, steps)
    with_weights = ranks.tensor > 1 or config.optim.optimizer == "muon"
    if config.model.residual == BLOCK and with_weights:
        weights = gather(run.model, run.whole, ranks)
        save(run)
        if ranks.main:
            save_file(weights, out / "weights.safetensors")
    if ranks.main:
        save_file(gradients, out / "gradients.safetensors")
        (out / "values.json").write_text(json.dumps(values))
    run.log.close()


def work(jobs: list[tuple[Case, Config, Path]]) -> None:
    # Every layer shares the graphs of the first.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled = torch.nn.Module.compile
    pipeline.trace_states = trace_once(pipeline.trace_states)
    for case, config, out in jobs:
        torch.compiler.reset()  # each is a run of its own
        # The same graphs, of which inductor would take a minute to make machine code. Beside collectives the backward
        # is traced too.
        backend = "aot_eager" if "tensor" in case.layout else "eager"
        torch.nn.Module.compile = functools.partialmethod(compiled, backend=backend, fullgraph=True)
        with precise() if case.muon == "fp32" else nullcontext():
            one_case(config, out, case.steps)


def trace_once(trace: Callable[..., States]) -> Callable[..., States]:
    """The states at cuts take seconds to find: many layouts cut one model, and one rank finds it for all."""

    @functools.cache
    def traced(*arguments: Any) -> States:
        states = [trace(*arguments) if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(states)
        return cast(States, states[0])

    return traced


@functools.cache
def grid(pipeline: int, tensor: int, shard: int) -> Ranks:
    settings = ParallelSettings(pipeline=pipeline, tensor=tensor, shard=shard, hang_timeout=60)
    return join(settings, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases of a world in one group of processes: starting them is what takes time."""
    folder = tmp_path_factory.mktemp("parallel")
    config = settings(folder, "standard")
    for world, layouts in LAYOUTS.items():
        jobs = []
        for case in CASES:
            if case.world == world:
                layout = {**layouts[case.layout], "block_cache": case.cache, "hang_timeout": 60}
                jobs.append((case, settings_of(case, config, **layout), folder / str(case)))
        spawn(world, work, jobs)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same from one process, once for each residual."""
    folder = tmp_path_factory.mktemp("alone")

    known: dict[Any, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}

    def follow_alone(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        key = case.residual, case.steps, case.muon, case.layers
        if key in known:
            return known[key]
        plain = replace(case, compile=False, recompute=False)
        config = settings_of(plain, settings(folder, case.residual))
        run = begin(config, folder / str(len(known)), resume=False)
        values = {"loss": accumulate(run, 1)}
        gradients = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        values |= measure(run)
        run.model.zero_grad()
        with precise() if case.muon == "fp32" else nullcontext():
            values |= follow(run, case.steps)
        values["weights"] = run.whole.weights()
        known[key] = gradients, values
        return known[key]

    return follow_alone


NEAR = {
    "loss": {"abs": 1e-6},
    "losses": {"abs": 1e-5},
    "bits": {"abs": 1e-5},
    "norm": {"rel": 1e-5},
    "depth": {"rel": 1e-5},
    "norms": {"rel": 1e-4},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.muon != "bf16"], ids=str)
def test_many_processes_do_what_one_does(folder, alone, case):
    values = read_json(folder / str(case) / "values.json")
    gradients, expected = alone(case)
    for key, near in NEAR.items():
        assert values[key] == pytest.approx(expected[key], **near), key
    assert values["clipped"] == pytest.approx(values["norm"] / 2, rel=1e-5)
    whole = load_file(folder / str(case) / "gradients.safetensors")
    assert whole.keys() == gradients.keys()
    for key, gradient in gradients.items():
        error = (whole[key] - gradient).abs().max().item()
        assert error <= 1e-6 + 1e-4 * gradient.abs().max().item(), key
    assert values.get("left", 0) == 0  # neither a tensor nor a deposit outlives its micro-batch


def furthest(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == expected.keys()
    distances = [(weights[name] - value).abs().max() for name, value in expected.items()]
    return max(distances).item()


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_MUON, ids=str)
def test_muon_orthogonalises_whole_matrices(folder, alone, case):
    """The weights in fp32 are those of one process; in bf16 they are as close to what fp32 gives as its weights are."""
    weights = load_file(folder / str(case) / "weights.safetensors")
    expected = alone(case)[1]["weights"]
    if case.muon == "fp32":
        assert furthest(weights, expected) < 1e-5
        return
    with precise():
        config = settings_of(case, settings(folder / str(case), case.residual))
        run = begin(config, folder / str(case) / "fp32", resume=False)
        start = {name: value.clone() for name, value in run.whole.weights().items()}
        follow(run, case.steps)
    error, moved = furthest(expected, run.whole.weights()), furthest(expected, start)
    assert 0 < furthest(weights, run.whole.weights()) <= 2 * error < moved / 10


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_TENSOR, ids=str)
def test_what_tensor_parallel_ranks_save_is_the_whole_model(folder, case):
    weights = load_file(folder / str(case) / "weights.safetensors")
    model, _ = load_model(folder / str(case))
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_layer_is_fetched_at_once_unless_forwards_are_repeated():
    with torch.device("meta"):
        model = Decoder(ModelConfig.named("tiny", vocab_size=64, layers=3))
    held = list(model.sublayers)[1:5]  # of a stage that begins and ends inside a layer
    groups = fetched_together(held, recompute=False)
    assert groups == [[held[0].body], [held[1].body, held[2].body], [held[3].body]]
    assert fetched_together(held, recompute=True) == [[sublayer.body] for sublayer in held]


CACHED = (
    "interleaved",
    "interleaved-4",
    "looped",
    "uneven",
    "interleaved-wide",
    "interleaved-shard",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.residual == BLOCK and c.layout in CACHED and not c.muon],
    ids=str,
)
def test_bytes_are_those_of_the_derivation(folder, case):
    """docs/explanation/pipeline-cache.md: before sublayer c there are 1 + ceil(c / S) sources; a rank that has been at
    depth d already has 1 + floor(d / S) of them."""
    layout, block, sublayers = LAYOUTS[case.world][case.layout], 3, 8
    ranks = layout["pipeline"]
    stages = ranks * layout["chunks"]
    even = [s * sublayers // stages for s in range(stages)]
    cuts = (0, *layout["cuts"]) if "cuts" in layout else even
    sent = {}
    for s in range(1, stages):
        sources = 1 + math.ceil(cuts[s] / block)
        if case.cache and s >= ranks:
            sources -= 1 + cuts[s - ranks + 1] // block
        data = case.world // ranks
        sent[s] = sources * (16 // data) * 8 * 16 * 4  # windows, tokens, channels, bytes
    counted = read_json(folder / str(case) / "values.json")["bytes"]
    assert {s + 1: forward for s, forward, _ in counted if s + 1 < stages} == sent
    # Gradients travel the same way back
    assert {s: backward for s, _, backward in counted if s} == sent
