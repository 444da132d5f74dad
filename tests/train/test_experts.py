"""Kimi Linear in the trainer: resumed bitwise with its routers' biases; one process = two = expert-parallel two."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import precise, spawn
from safetensors.torch import load_file, save_file
from tinykimi import KIMI
from tinyrun import fingerprint, read_all, tiny

from headwater.analyze.report import write_report
from headwater.errors import UserError
from headwater.models.moe import routers
from headwater.runs.settings import Config, ParallelSettings
from headwater.train import load_run, train
from headwater.train.distributed.fsdp import gather
from headwater.train.distributed.plan import footprint, make_plan
from headwater.train.distributed.ranks import join
from headwater.train.loop import accumulate, evaluate, update
from headwater.train.muon import StackedMuon
from headwater.train.run import begin, save, with_vocabulary

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {},
    "pipeline": {"pipeline": 2, "chunks": 2, "cuts": (1, 4, 7)},
    "experts": {"tensor": 2},  # tensor parallelism divides experts
    "experts muon": {"tensor": 2},
}


def kimi(folder: Path, *, optimizer: str = "adamw", **changes: Any) -> Config:
    config = tiny(folder, residual="attnres-block:block=3", optimizer=optimizer, **changes)
    return replace(
        config, model=replace(config.model, layers=4, context=16, router_rate=0.01, **KIMI)
    )


def layout(folder: Path, name: str) -> Config:
    config = kimi(
        folder, optimizer="muon" if "muon" in name else "adamw", batch_size=8, accumulate=2
    )
    return replace(config, parallel=ParallelSettings(**LAYOUTS.get(name, {}), hang_timeout=60))


def follow(config: Config, out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Losses and loads of some steps, the evaluation, and the weights after them."""
    ranks = join(config.parallel, torch.device("cpu"))
    run = begin(config, out, resume=False, ranks=ranks)
    found: dict[str, Any] = {"losses": [], "norms": [], "loads": []}
    for number in range(1, STEPS + 1):
        found["losses"].append(accumulate(run, number))
        found["norms"].append(update(run, number, found["losses"][-1])[0])
        found["loads"].append(list(run.load))
        run.step = number
    found["bits"] = evaluate(run)
    save(run)
    weights = run.whole.weights() if ranks.alone else gather(run.model, run.whole, ranks)
    run.log.close()
    return weights, found


def work(jobs: list[tuple[Config, Path]]) -> None:
    for config, out in jobs:
        with precise():
            weights, found = follow(config, out)
        if weights:
            save_file(weights, out / "weights.safetensors")
            (out / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    spawn(2, work, [(layout(folder, name), folder / name) for name in LAYOUTS])
    work(
        [
            (replace(layout(folder, name), parallel=ParallelSettings()), folder / f"alone{name}")
            for name in ("", " muon")
        ]
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_do_what_one_does(folder, name):
    other = "alone muon" if "muon" in name else "alone"
    found, expected = (json.loads((folder / n / "found.json").read_text()) for n in (name, other))
    for key, value in expected.items():
        tolerance = 1e-6 if key == "loads" else 1e-4
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(value), atol=tolerance, rtol=tolerance
        )
    weights, whole = (load_file(folder / n / "weights.safetensors") for n in (name, other))
    assert weights.keys() == whole.keys()
    for tensor, value in whole.items():
        torch.testing.assert_close(weights[tensor], value, atol=2e-4, rtol=1e-3, msg=tensor)
    biases = {key: value for key, value in whole.items() if key.endswith("router.bias")}
    assert len(biases) == 3
    for key, bias in biases.items():
        assert bias.any()
        assert torch.equal(weights[key], bias), key
    checkpoint = read_all(folder / name / "checkpoints" / f"step-{STEPS:08}", "model")
    assert all(torch.equal(value, weights[key]) for key, value in checkpoint.items())


def test_it_resumes_bitwise_with_its_biases(tmp_path):
    out = tmp_path / "run"
    config = kimi(tmp_path, optimizer="muon", steps=4, save_every=2, depth_every=4)
    train(config, out, progress=False)
    whole = fingerprint(out)
    assert all(router.bias.any() for router in routers(load_run(out).model).values())
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    (out / "summary.json").unlink()
    train(config, out, resume=True, progress=False)
    assert fingerprint(out) == whole


def test_what_is_logged_of_loads(tmp_path):
    config = kimi(tmp_path, steps=4, depth_every=4)
    train(config, tmp_path / "run", progress=False)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if record["kind"] == "train"]
    assert all(0 <= record["expert_load_cv"] < record["expert_load_max"] <= 4 for record in steps)
    depth = next(record for record in records if record["kind"] == "depth")
    assert depth["sublayers"] == ["kda", "mlp", "kda", "moe", "kda", "moe", "mla", "moe"]
    assert [i for i, load in enumerate(depth["expert_load"]) if load] == [3, 5, 7]
    # In means
    assert all(sum(load) == pytest.approx(4, rel=1e-4) for load in depth["expert_load"] if load)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "4 layers, width 16, kda*3:mla, 4 experts" in page
    # A number for each layer with experts
    assert re.search(r'"experts":\s*\[null,\s*null,\s*null,\s*0?\.\d', page)
    assert all(
        (load is None) == (value is None)
        for load, value in zip(depth["expert_load"], depth["expert_load_cv"])
    )


def test_muon_orthogonalises_each_expert_by_itself():
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(8, 6, 4))
    single = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stacked = StackedMuon([stack], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    plain = torch.optim.Muon(single, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(8, 6, 4)
        stack.grad = gradient
        for matrix, part in zip(single, gradient):
            matrix.grad = part.clone()
        stacked.step()
        plain.step()
    torch.testing.assert_close(
        stack.detach(), torch.stack([m.detach() for m in single]), atol=2e-3, rtol=2e-2
    )


def test_the_plan_of_a_mixture(tmp_path):
    config = kimi(tmp_path)
    model = with_vocabulary(config.model, 257)
    found = footprint(model, 2, half=False, fused=False)
    assert len(found.kept) == 9
    two = make_plan(
        replace(config, parallel=ParallelSettings(tensor=2)), model, 2, half=True, fused=True
    )
    assert two.ranks[0].parameters < sum(found.parameters) + found.embedding


def test_what_ranks_cannot_divide_is_named(tmp_path):
    config = replace(kimi(tmp_path), parallel=ParallelSettings(tensor=2))
    model = with_vocabulary(replace(config.model, experts=5), 257)
    with pytest.raises(UserError, match=r"must divide model\.experts, 5"):
        make_plan(config, model, 2, half=False, fused=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned_fla")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_on_a_gpu_it_trains_from_a_captured_graph_and_resumes_bitwise(tmp_path, optimizer):
    """Loads, biases and Muon's stacks without the host; the kernels are fla's where it is installed."""
    config = kimi(
        tmp_path, optimizer=optimizer, device="cuda", steps=8, save_every=4, depth_every=8
    )
    shape = {"dim": 64, "heads": 2, "kv_heads": 2, "mlp_dim": 96, "context": 128}
    config, out = replace(config, model=replace(config.model, **shape)), tmp_path / "run"
    train(config, out, progress=False)
    whole = fingerprint(out)
    assert all(
        record["expert_load_cv"] > 0 for record in whole["metrics"] if record["kind"] == "train"
    )
    assert all(router.bias.any() for router in routers(load_run(out).model).values())
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    train(config, out, resume=True, progress=False)
    assert fingerprint(out) == whole
