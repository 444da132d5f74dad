"""Steps that leave the host out: the judge here, on any device; the rest on a GPU."""

import math
import random
from dataclasses import asdict
from functools import partial

import pytest
import torch
from tinyrun import fingerprint, go_back, tiny

from headwater.errors import UserError
from headwater.models.moe import routers
from headwater.ops.cross_entropy import token_losses
from headwater.runs.settings import TrainSettings
from headwater.train import loop
from headwater.train.device_step import WARMUP, DeviceStep, Judge
from headwater.train.loop import accumulate, host_windows, train, update
from headwater.train.losses import half_precision
from headwater.train.monitor.bad_steps import Skips
from headwater.train.muon import BatchedMuon
from headwater.train.optim import build_optimizers
from headwater.train.run import begin

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_a_gpu(test):
    return pytest.mark.gpu(needs_gpu(test))


@pytest.mark.parametrize("window", [4, 5])
def test_the_judge_on_the_device_decides_as_the_one_on_the_host(window):
    """Drawn losses with spikes and numbers that are not finite, and a resume in between."""
    settings = TrainSettings(skip_spikes=3, skip_nonfinite=3, spike_window=window, spike_sigmas=3.0)
    draw, cpu = random.Random(window), torch.device("cpu")
    host, books = Skips(), Skips()
    judge = Judge(books, settings, cpu)
    kinds = set()
    for step in range(200):
        if step == 100:  # what a checkpoint holds is enough to go on
            books = Skips(**asdict(books))
            judge = Judge(books, settings, cpu)
        loss = draw.choice([draw.gauss(3, 0.1)] * 8 + [draw.gauss(9, 1), math.nan])
        norm = draw.choice([1.0] * 20 + [math.inf])
        expected = host.judge(loss, norm, settings)
        judge(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm))
        kind = ("", "nonfinite", "spike")[int(judge.kind)]
        reason = judge.record(loss, kind, judge.threshold.item())
        assert bool(judge.bad) == (reason is not None) == (expected is not None)
        if reason is not None:
            for key in ("kind", "limit", "in_a_row"):
                assert getattr(reason, key) == getattr(expected, key)
            kinds.add(reason.kind)
        assert asdict(books) == asdict(host)
    assert kinds == {"spike", "nonfinite"}


def test_a_resumed_judge_has_the_last_losses_at_the_end_of_its_window():
    """The next losses follow them, and the oldest leave first."""
    settings = TrainSettings(skip_spikes=3, spike_window=4)
    judge = Judge(Skips(losses=[1.0, 2.0]), settings, torch.device("cpu"))
    for loss in (3.0, 4.0):
        judge(torch.tensor(loss), torch.tensor(1.0))
    assert judge.losses.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert judge.threshold == math.inf
    judge(torch.tensor(5.0), torch.tensor(1.0))
    assert judge.losses.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert judge.threshold.item() == pytest.approx(2.5 + 6 * 1.4826 * 1.0)


def without_a_graph(config, out, *, resume=False):
    """A run on the CPU whose steps are those of a GPU, kernel by kernel."""
    run = begin(config, out, resume=resume)
    run.optimizers = build_optimizers(run.model, config.optim, on_device=True)
    return run, DeviceStep(run, partial(host_windows, run), graph=False, say=print)


def weights_of(run) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(run.whole.parameters()).detach().clone()


EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_dim": 8, "router_rate": 0.1}
CASES = [
    ({}, "adamw", "cosine"),
    ({}, "muon", "wsd"),
    (EXPERTS, "adamw", "wsd"),
    (EXPERTS, "muon", "cosine"),
]
# Muon's iteration is in bf16, in batches on the device and one by one on the host.
NEAR = {"adamw": {"rtol": 1e-4, "atol": 1e-6}, "muon": {"rtol": 2e-2, "atol": 2e-3}}


@pytest.mark.parametrize(("shape", "optimizer", "schedule"), CASES)
def test_its_steps_are_those_of_the_host(tmp_path, shape, optimizer, schedule):
    """Losses, gradient norms, learning rates, loads of experts, and what the weights come to; with a step left out."""
    settings = {"optimizer": optimizer, "schedule": schedule, "decay": 0.5, "clip": 0.3, **shape}
    config = tiny(tmp_path, accumulate=2, steps=6, skip_nonfinite=1, **settings)
    near, bad = NEAR[optimizer], 4
    host = begin(config, tmp_path / "host", resume=False)
    run, device = without_a_graph(config, tmp_path / "device")
    backward = device._backward

    def spoiled() -> torch.Tensor:
        return backward() * (math.nan if device.steps_taken + 1 == bad else 1.0)

    device._backward = spoiled
    for number in range(1, 7):
        weights, biases = weights_of(run), biases_of(run)
        loss = accumulate(host, number) * (math.nan if number == bad else 1.0)
        grad_norm, rate = update(host, number, loss)
        outcome = [*device.take(number), *device.wait()][-1]
        assert (outcome.number, outcome.rate) == (number, rate)
        values = torch.tensor([outcome.loss, outcome.grad_norm])
        expected = torch.tensor([loss, grad_norm])
        torch.testing.assert_close(values, expected, **near, equal_nan=True)
        left_out = number == bad
        assert (outcome.reason is not None) == left_out
        assert torch.equal(weights_of(run), weights) == left_out
        if shape:
            assert torch.equal(biases_of(run), biases) == left_out
            torch.testing.assert_close(biases_of(run), biases_of(host))
            assert outcome.load == pytest.approx(host.load)
            assert not any(router.load.any() for router in routers(run.whole).values())
        torch.testing.assert_close(weights_of(run), weights_of(host), **near)
    assert run.skips.total == host.skips.total == 1


def biases_of(run) -> torch.Tensor:
    biases = [router.bias for router in routers(run.whole).values()]
    return torch.cat([torch.zeros(0), *biases]).clone()


def test_muon_in_batches_is_torchs_and_leaves_bad_steps_out():
    torch.manual_seed(0)
    ours, torchs = [], []
    for shape in [(8, 4), (4, 8), (8, 4), (6, 6)]:
        value = torch.randn(shape)
        ours.append(torch.nn.Parameter(value.clone()))
        torchs.append(torch.nn.Parameter(value.clone()))
    options = {"lr": 0.02, "weight_decay": 5.0, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    batched, plain = BatchedMuon(ours, **options), torch.optim.Muon(torchs, **options)
    batched.found_inf = torch.zeros(())

    def everything() -> torch.Tensor:
        momenta = [batched.state[p]["momentum_buffer"] for p in ours]
        return torch.cat([tensor.detach().flatten() for tensor in (*ours, *momenta)])

    for number in range(4):
        for parameter, other in zip(ours, torchs, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            other.grad = parameter.grad.clone()
        if number == 2:
            before = everything()
            ours[0].grad.fill_(math.nan)
            batched.found_inf.fill_(1)
            batched.step()
            batched.found_inf.fill_(0)
            assert torch.equal(everything(), before)
            ours[0].grad = torchs[0].grad.clone()
        batched.step()
        plain.step()
        for parameter, other in zip(ours, torchs, strict=True):
            # The iteration is in bf16
            torch.testing.assert_close(parameter, other, atol=2e-3, rtol=2e-2)


def gpu(tmp_path, **changes):
    return tiny(tmp_path, device="cuda", **changes)


@on_a_gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("residual", ["standard", "attnres-block:block=2", "mhc:streams=2"])
class TestOnAGPU:
    def test_captured_or_not_the_bits_are_the_same(self, tmp_path, residual, optimizer):
        prints = []
        for graph in (True, False):
            out, options = tmp_path / f"graph-{graph}", {"accumulate": 2, "graph": graph}
            train(gpu(tmp_path, residual=residual, optimizer=optimizer, **options), out)
            prints.append(fingerprint(out))
        assert prints[0] == prints[1]

    def test_a_resumed_run_is_bitwise_the_undisturbed_one(self, tmp_path, residual, optimizer):
        config, out = gpu(tmp_path, residual=residual, optimizer=optimizer), tmp_path / "run"
        train(config, out)
        whole = fingerprint(out)
        go_back(out, 5)
        train(config, out, resume=True)
        assert fingerprint(out) == whole


@on_a_gpu
@pytest.mark.parametrize(
    "residual", ["attnres-full", "mhc", "hyper-connections", "muddformer", "denseformer"]
)
def test_an_evaluation_rounds_as_a_step_does(tmp_path, residual):
    """Its loss on the windows of a step is that of the step; a GPU's autocast makes sums fp32, which a last sum over
    streams is not to leave to the head."""
    runs = [
        begin(gpu(tmp_path, residual=spec), tmp_path / spec, resume=False)
        for spec in ("standard", residual)
    ]
    with torch.no_grad():
        runs[1].whole.head.weight.mul_(20)
    windows = host_windows(runs[1], 1, 0).cuda()
    with half_precision(runs[1].device, cached=False):
        plain, hidden = (run.hidden(windows[:, :-1]) for run in runs)
    assert hidden.dtype == plain.dtype
    step = DeviceStep(runs[1], partial(host_windows, runs[1]), graph=False, say=print)
    step.tokens.copy_(windows)
    losses = step.losses(windows)
    torch.testing.assert_close(losses.mean(), step._backward() * step.micros, rtol=1e-6, atol=0)
    with torch.no_grad():  # rounding is worth something here, or the line above could not fail
        fine = token_losses(
            runs[1].hidden(windows[:, :-1]), runs[1].whole.head.weight, windows[:, 1:]
        )
    assert (losses - fine).abs().max() > 1e-3
    for run in runs:
        run.log.close()


def poisoned(run, bad):
    """Token 5 has an embedding that is not a number; only the step `bad` sees it."""
    with torch.no_grad():
        run.whole.embedding.weight[5] = math.nan

    def batch(number, micro):
        tokens = host_windows(run, number, micro).clone()
        tokens[tokens == 5] = 6
        tokens[0, 0] = 5 if number == bad else 6
        return tokens

    return batch


def moved(before, after) -> list[str]:
    names = []
    for name, value in before.items():
        if not torch.equal(after[name].nan_to_num(), value.nan_to_num()):
            names.append(name)
    return names


@on_a_gpu
@pytest.mark.parametrize("bad", [2, WARMUP + 3])
def test_a_bad_step_never_reaches_the_weights(tmp_path, bad):
    config = gpu(tmp_path, skip_nonfinite=1, tie_embeddings=False)
    run = begin(config, tmp_path / "run", resume=False)
    step = DeviceStep(run, poisoned(run, bad), graph=True, say=print)
    outcomes, weights = [], {}
    for number in range(1, 10):
        outcomes += [*step.take(number), *step.wait()]
        weights[number] = {name: p.detach().clone() for name, p in run.whole.named_parameters()}
    assert step.graph
    assert [o.number for o in outcomes] == list(range(1, 10))
    assert [o.number for o in outcomes if o.reason] == [bad]
    assert outcomes[bad - 1].reason.kind == "nonfinite"
    assert run.skips.total == 1
    assert not moved(weights[bad - 1], weights[bad])
    count = len(moved(weights[bad], weights[bad + 1]))
    assert count > len(weights[bad]) // 2
    run.log.close()


@on_a_gpu
def test_what_cannot_be_captured_runs_without_a_graph_and_says_so(tmp_path, capsys, monkeypatch):
    """A write that asks the GPU for a number, which a capture cannot know: as a run without graphs, and it says so."""
    from headwater.residuals.attention import AttentionResidual

    real = AttentionResidual._write

    def _write(self, state, i, output):
        output.sum().item()
        return real(self, state, i, output)

    monkeypatch.setattr(AttentionResidual, "_write", _write)
    prints = []
    for graph in (True, False):
        out = tmp_path / f"graph-{graph}"
        train(gpu(tmp_path, graph=graph, compile="none"), out)
        prints.append(fingerprint(out))
        assert ("not captured as a CUDA graph" in capsys.readouterr().out) == graph
        torch.randn(1, device="cuda")
    assert prints[0] == prints[1]


@on_a_gpu
def test_too_many_bad_steps_stop_the_run_and_leave_the_last_good_checkpoint(tmp_path, monkeypatch):
    config = gpu(tmp_path, save_every=2, tie_embeddings=False)

    def windows(run, number, micro):
        # The embedding turns bad with the batch that meets it: weights that are not finite are never saved.
        if number == 7:
            return poisoned(run, 7)(number, micro)
        return host_windows(run, number, micro)

    monkeypatch.setattr(loop, "host_windows", windows)
    with pytest.raises(
        UserError, match=r"not finite at step 7 .*last good checkpoint is .*step-00000006"
    ):
        train(config, tmp_path / "run")
    assert (tmp_path / "run" / "nonfinite-step-7.json").exists()
