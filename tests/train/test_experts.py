"""Kimi Linear in the trainer: resumed bitwise with its routers' biases; one process = two = expert-parallel two."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import precise, spawn
from safetensors.torch import load_file, save_file
from tinykimi import KIMI
from tinyrun import checkpoint_of, fingerprint, go_back, logged, read_all, records, tiny

from headwater.analyze.report import write_report
from headwater.errors import UserError
from headwater.models.moe import routers
from headwater.runs.files import read_json
from headwater.runs.settings import Config
from headwater.train import load_run, train
from headwater.train.distributed.fsdp import gather
from headwater.train.distributed.plan import footprint, make_plan
from headwater.train.distributed.ranks import join
from headwater.train.files import write_json
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
ALONE = ("alone", "alone muon")


def kimi(folder: Path, **changes: Any) -> Config:
    shape = {"layers": 4, "context": 16, "router_rate": 0.01, **KIMI}
    return tiny(folder, **{"residual": "attnres-block:block=3", **shape, **changes})


def layout(folder: Path, name: str) -> Config:
    optimizer = "muon" if "muon" in name else "adamw"
    sizes = {"batch_size": 8, "accumulate": 2, "hang_timeout": 60}
    return kimi(folder, optimizer=optimizer, **sizes, **LAYOUTS.get(name, {}))


def follow(config: Config, out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Losses and loads of some steps, the evaluation, and the weights after them."""
    ranks = join(config.parallel, torch.device("cpu"))
    run = begin(config, out, resume=False, ranks=ranks)
    values: dict[str, Any] = {"losses": [], "norms": [], "loads": []}
    for number in range(1, STEPS + 1):
        values["losses"].append(accumulate(run, number))
        values["norms"].append(update(run, number, values["losses"][-1])[0])
        values["loads"].append(list(run.load))
        run.step = number
    values["bits"] = evaluate(run)
    save(run)
    weights = run.whole.weights() if ranks.alone else gather(run.model, run.whole, ranks)
    run.log.close()
    return weights, values


def work(jobs: list[tuple[Config, Path]]) -> None:
    for config, out in jobs:
        with precise():
            weights, values = follow(config, out)
        if weights:
            save_file(weights, out / "weights.safetensors")
            write_json(out / "values.json", values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    spawn(2, work, [(layout(folder, name), folder / name) for name in LAYOUTS])
    work([(layout(folder, name), folder / name) for name in ALONE])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_do_what_one_does(folder, name):
    other = "alone muon" if "muon" in name else "alone"
    values, expected = (read_json(folder / n / "values.json") for n in (name, other))
    for key, value in expected.items():
        near = dict.fromkeys(("atol", "rtol"), 1e-6 if key == "loads" else 1e-4)
        torch.testing.assert_close(torch.tensor(values[key]), torch.tensor(value), **near)
    weights, whole = (load_file(folder / n / "weights.safetensors") for n in (name, other))
    assert weights.keys() == whole.keys()
    for tensor, value in whole.items():
        torch.testing.assert_close(weights[tensor], value, atol=2e-4, rtol=1e-3, msg=tensor)
    biases = {key: value for key, value in whole.items() if key.endswith("router.bias")}
    assert len(biases) == 3
    for key, bias in biases.items():
        assert bias.any()
        assert torch.equal(weights[key], bias), key
    for key, value in read_all(checkpoint_of(folder / name, STEPS), "model").items():
        assert torch.equal(value, weights[key]), key


def assert_resumes_bitwise(config: Config, out: Path, step: int) -> None:
    train(config, out, progress=False)
    whole = fingerprint(out)
    assert all(router.bias.any() for router in routers(load_run(out).model).values())
    go_back(out, step)
    train(config, out, resume=True, progress=False)
    assert fingerprint(out) == whole


def test_it_resumes_bitwise_with_its_biases(tmp_path):
    config = kimi(tmp_path, optimizer="muon", steps=4, save_every=2, depth_every=4)
    assert_resumes_bitwise(config, tmp_path / "run", 2)


def test_what_is_logged_of_loads(tmp_path):
    out = tmp_path / "run"
    train(kimi(tmp_path, steps=4, depth_every=4), out, progress=False)
    for record in records(out, "train"):
        assert 0 <= record["expert_load_cv"] < record["expert_load_max"] <= 4
    (depth,) = records(out, "depth")
    assert depth["sublayers"] == ["kda", "mlp", "kda", "moe", "kda", "moe", "mla", "moe"]
    loads = {i: load for i, load in enumerate(depth["expert_load"]) if load}
    assert list(loads) == [3, 5, 7]
    assert list(loads) == [i for i, cv in enumerate(depth["expert_load_cv"]) if cv is not None]
    for load in loads.values():  # in means
        assert sum(load) == pytest.approx(4, rel=1e-4)
    page = write_report([out], tmp_path / "report.html").read_text()
    assert "4 layers, width 16, kda*3:mla, 4 experts" in page
    # A number for each layer with experts
    assert re.search(r'"experts":\s*\[null,\s*null,\s*null,\s*0?\.\d', page)


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
    matrices = torch.stack([matrix.detach() for matrix in single])
    torch.testing.assert_close(stack.detach(), matrices, atol=2e-3, rtol=2e-2)


def test_the_plan_of_a_mixture(tmp_path):
    config = kimi(tmp_path, tensor=2)
    model = with_vocabulary(config.model, 257)
    whole = footprint(model, 2, half=False, fused=False)
    assert len(whole.kept) == 9
    (rank,) = make_plan(config, model, 2, half=True, fused=True).ranks
    assert rank.parameters < sum(whole.parameters) + whole.embedding
    with pytest.raises(UserError, match=r"must divide model\.experts, 5"):
        make_plan(config, replace(model, experts=5), 2, half=False, fused=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned_fla")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_on_a_gpu_it_trains_from_a_captured_graph_and_resumes_bitwise(tmp_path, optimizer):
    """Loads, biases and Muon's stacks without the host; the kernels are fla's where it is installed."""
    shape = {"dim": 64, "heads": 2, "kv_heads": 2, "mlp_dim": 96, "context": 128}
    sizes = {"steps": 8, "save_every": 4, "depth_every": 8, **shape}
    config, out = kimi(tmp_path, optimizer=optimizer, device="cuda", **sizes), tmp_path / "run"
    assert_resumes_bitwise(config, out, 4)
    assert min(logged(out, "expert_load_cv")) > 0
