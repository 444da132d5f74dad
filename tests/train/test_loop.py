"""Training: resuming is bitwise, and the numbers in the log are right."""

import functools
import math
import shutil
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from disturbed import each_step, power_cut
from tinyrun import (
    STEPS,
    changed,
    checkpoint_of,
    fingerprint,
    go_back,
    logged,
    records,
    tiny,
)

from headwater.errors import UserError
from headwater.residuals import names, pinned
from headwater.residuals import record as record_of
from headwater.runs.record import read_run
from headwater.runs.settings import load_file
from headwater.train import loop
from headwater.train.checkpoint.folder import load_model, read_state
from headwater.train.data.dataset import prepare
from headwater.train.loop import evaluate, train, windows_of
from headwater.train.optim import learning_rate
from headwater.train.run import begin, save

RESUMED = [
    {"residual": "standard", "accumulate": 2, "checkpoint_activations": True},
    {"optimizer": "muon"},
    {"residual": "attnres-full", "optimizer": "muon", "async_save": True, "save_every": 2},
]


@pytest.mark.parametrize("settings", RESUMED)
def test_resume_is_bitwise(tmp_path, settings):
    config, whole = tiny(tmp_path, **settings), tmp_path / "whole"
    summary = train(config, whole)
    assert summary.steps == STEPS
    for step in (3, 8):  # before the first checkpoint, and after it
        out = tmp_path / f"cut{step}"
        with power_cut(step):
            train(config, out)
        assert not (out / "summary.json").exists()
        again = train(config, out, resume=True)
        assert fingerprint(out) == fingerprint(whole)
        assert (again.loss, again.tokens) == (summary.loss, summary.tokens)


@pytest.mark.parametrize("residual", names())
def test_every_residual_trains_logs_and_resumes(tmp_path, residual):
    config = tiny(tmp_path, residual=residual, steps=2, depth_every=2, save_every=1)
    out = tmp_path / "run"
    train(config, out)
    whole = fingerprint(out)
    assert {"train", "eval", "depth"} == {record["kind"] for record in whole["metrics"]}
    go_back(out, 1)
    train(config, out, resume=True)
    assert fingerprint(out) == whole
    model, _ = load_model(out)
    # Options that follow from the network are written out
    assert model.config.residual == pinned(model.residual)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_resume_is_bitwise_on_a_gpu(tmp_path, async_save):
    """The run is in bf16 and has deterministic kernels; steps beyond the cut repeat those of the undisturbed run."""
    config = tiny(tmp_path, device="cuda", async_save=async_save)
    train(config, tmp_path / "whole")
    with power_cut(8):
        train(config, tmp_path / "cut")
    train(config, tmp_path / "cut", resume=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_run_without_checkpoints_begins_anew_and_says_so(run_folder, capsys):
    config = changed(load_file(run_folder), warmup=48)
    go_back(run_folder, 0)
    train(config, run_folder, resume=True)
    output = capsys.readouterr().out
    message = "to go on from (one is written every 5 steps): the run begins anew\n"
    assert f"no checkpoint in {run_folder / 'checkpoints'} {message}" in output
    assert "at 25 % of its learning rate: raise train.steps or lower optim.warmup" in output


def test_a_run_is_taken_further_than_planned_and_says_so(tmp_path, capsys):
    """The rate of wsd is the plain one until the decay: a run that has not decayed yet goes on bitwise as if it had
    been planned so."""
    config = tiny(tmp_path, schedule="wsd", decay=0.0)
    longer = changed(config, steps=24)
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    train(longer, whole)
    assert train(config, grown).steps == 12
    capsys.readouterr()
    assert train(longer, grown, resume=True).steps == 24
    words = "goes to 24 steps, where 12 were planned: from step 12 on the learning rate is now"
    assert words in capsys.readouterr().out
    extended = fingerprint(grown)
    assert extended["files"] == fingerprint(whole)["files"]
    assert load_file(grown).train.steps == 24
    (extension,) = records(grown, "extend")
    assert [extension[key] for key in ("step", "planned", "steps")] == [12, 12, 24]
    assert "planned for 12 steps, and for 24 from step 12 on" in " ".join(read_run(grown).notes)
    assert train(longer, grown, resume=True).steps == 24
    assert fingerprint(grown) == extended
    with pytest.raises(UserError, match=r"train.steps must be at least 24"):
        train(config, grown, resume=True)


def test_training_learns(tmp_path):
    rare = dict.fromkeys(("steps", "log_every", "depth_every", "save_every"), 60)
    train(tiny(tmp_path, **rare, eval_every=20, lr=0.02, query_lr=1.0), tmp_path / "run")
    first, _, last = (record["bits_per_byte"] for record in records(tmp_path / "run", "eval"))
    assert last < 0.7 * first


@pytest.mark.parametrize(
    "settings", [{"accumulate": 4}, {"checkpoint_activations": True}, {"compile": "model"}], ids=str
)
def test_what_saves_memory_or_time_does_not_change_the_result(tmp_path, monkeypatch, settings):
    # The eager backend needs no C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    runs = tmp_path / "plain", tmp_path / "other"
    plain = train(tiny(tmp_path, steps=4), runs[0])
    other = train(tiny(tmp_path, steps=4, **settings), runs[1])
    assert other.loss == pytest.approx(plain.loss, rel=1e-4)
    # Clipping and AdamW would hide a factor on all gradients; the log shows it.
    for key in ("loss", "grad_norm"):
        assert logged(runs[0], key) == pytest.approx(logged(runs[1], key), rel=1e-3)


def test_every_update_has_the_rate_of_its_number_and_is_clipped_at_the_limit(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(loop, "clip", lambda model, norm, limit: limits.append(limit))
    config = tiny(tmp_path, clip=0.25)
    train(config, tmp_path / "run")
    rates = [learning_rate(number, STEPS, config.optim) for number in range(STEPS)]
    assert logged(tmp_path / "run", "lr") == rates
    assert limits == [0.25] * STEPS


def test_a_step_sees_the_batch_of_its_seed_and_number(tmp_path):
    batches = []
    for seed in (0, 7):
        run = begin(tiny(tmp_path, seed=seed, accumulate=2), tmp_path / str(seed), resume=False)
        for number, micro in ((1, 0), (1, 1), (2, 0)):
            expected = run.train.batch(seed=seed, step=number - 1, size=4, micro=micro, micros=2)
            batches.append(windows_of(run, number, micro))
            assert torch.equal(batches[-1], torch.from_numpy(expected))
        run.log.close()
    assert not any(torch.equal(one, other) for one, other in combinations(batches, 2))


def test_speed_is_of_the_steps_since_the_clock_was_wound(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    clock = loop.Clock(SimpleNamespace(step=6, tokens_at=lambda step: 10 * step))
    now[0] += 4
    assert clock.tokens_per_second(8) == 2 * 10 / 4
    clock.rewind(8)
    now[0] += 5
    assert clock.tokens_per_second(9) == 10 / 5


def test_wall_clock_and_memory_go_on_where_a_run_is_resumed(tmp_path):
    config, out = tiny(tmp_path, steps=2, save_every=1), tmp_path / "run"
    train(config, out)
    (out / "summary.json").unlink()
    last = read_state(checkpoint_of(out, 2))
    assert last["seconds"] > 0
    run = begin(config, out, resume=True)
    assert (run.seconds, run.peak_memory, run.step) == (last["seconds"], last["peak_memory"], 2)
    assert run.elapsed() >= run.seconds
    assert run.evaluation == last["evaluation"] != {}
    run.seconds += 5000
    run.began -= 1000
    loop.log_update(run, loop.Outcome(2, 1.0, 1.0, 0.1), 1.0)
    assert logged(out, "seconds")[-1] > 6000
    save(run)
    run.log.close()
    assert read_state(checkpoint_of(out, 2))["seconds"] >= last["seconds"] + 6000
    assert train(config, out, resume=True).seconds >= last["seconds"] + 6000


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path, tokenizer):
    """Every logit is zero, so a token costs log2(vocab) bits, however many bytes it stands for."""
    config = tiny(tmp_path, tokenizer=tokenizer, bpe_vocab=300, accumulate=2)
    run = begin(config, tmp_path / "run", resume=False)
    # As many windows at a time as a micro-batch has
    assert {count for _, count in loop.validation_shares(run)} == {2}
    with torch.no_grad():
        run.model.head.weight.zero_()
    bits, vocabulary = evaluate(run), run.model.config.vocab_size
    windows = run.validation.take(run.validation.spread(8))[:, 1:]
    num_bytes = len(prepare(config.data).tokenizer.decode(windows.flatten()).encode())
    assert bits == pytest.approx(math.log2(vocabulary) * windows.size / num_bytes, rel=1e-5)
    assert run.evaluation["loss"] == pytest.approx(math.log(vocabulary), rel=1e-5)


def sizes(tensors) -> list[float]:
    return [tensor.square().mean().sqrt().item() for tensor in tensors]


@pytest.mark.parametrize("residual", ["standard", "attnres-full"])
def test_depth_records(tmp_path, residual):
    config, out = tiny(tmp_path, residual=residual), tmp_path / "run"
    train(config, out)
    depth = records(out, "depth")
    assert [record["step"] for record in depth] == [6, 12]
    # The record of the last step is that of the model as it was saved.
    model, _ = load_model(out)
    validation = prepare(config.data).windows("validation", 32)
    with torch.no_grad(), record_of(model.residual) as trace:
        model(torch.from_numpy(validation.take(validation.spread(1)))[:, :-1])
    assert depth[-1]["output_norm"] == pytest.approx(sizes(trace.sources[1:]), rel=1e-4)
    assert depth[-1]["read_norm"] == pytest.approx(sizes(trace.reads), rel=1e-4)
    for record in depth:
        assert record["sublayers"] == ["attention", "mlp"] * 2
        lengths = [len(record[key]) for key in ("output_norm", "gradient_norm", "read_norm")]
        assert lengths == [4, 4, 5]
        assert min(record["gradient_norm"]) > 0
        mixing, entropy = np.array(record["mixing"]), np.array(record["entropy"])
        assert np.allclose(mixing, np.tril(mixing))
        most = np.log(np.arange(1, 6))
        if residual == "standard":
            assert np.allclose(mixing, np.tril(np.ones((5, 5))), atol=1e-4)
            assert np.allclose(entropy, most, atol=1e-4)
        else:
            assert np.allclose(mixing.sum(1), 1, atol=1e-4)
            assert (entropy <= most + 1e-4).all()


def test_gradients_by_depth_are_those_before_clipping(tmp_path):
    outcomes = []
    for limit in (1e-3, 1e3):
        run = begin(tiny(tmp_path, depth_every=1, clip=limit), tmp_path / str(limit), resume=False)
        outcomes += loop.HostStep(run).take(1)
        run.log.close()
    clipped, plain = outcomes
    assert clipped.depth == plain.depth
    assert 0.1 < math.hypot(*plain.depth) < plain.grad_norm == clipped.grad_norm


@pytest.mark.parametrize("harm", ["moved", "removed", "replaced"])
def test_a_run_whose_folder_goes_away_ends_at_its_next_save(tmp_path, monkeypatch, harm):
    out = tmp_path / "run"

    def act(run):
        if run.step != 3:
            return
        if harm == "moved":
            out.rename(tmp_path / "elsewhere")
        elif harm == "removed":
            shutil.rmtree(out)
        else:
            (out / ".lock").unlink()  # and so another process may begin here
            Path(shutil.copy(out / "metrics.jsonl", tmp_path)).replace(out / "metrics.jsonl")

    each_step(monkeypatch, act)
    with pytest.raises(UserError, match=r"metrics\.jsonl is no longer the file"):
        train(tiny(tmp_path), out)
    assert not (out / "summary.json").exists()
    assert not list(out.glob("checkpoints/step-*"))


def test_a_log_that_is_not_what_was_written_is_told_on_resume(run_folder, capfd):
    log, config = run_folder / "metrics.jsonl", load_file(run_folder)
    lines = log.read_bytes().splitlines(keepends=True)
    foreign = lines[3].replace(b"loss", b"lass")
    log.write_bytes(b"".join([*lines[:3], foreign, b"\0" * 40, b"\n", *lines[5:]]))
    train(changed(config, steps=14), run_folder, resume=True)
    words = f"not what was written until step 12: {len(lines) - 1} records"
    assert words in capfd.readouterr().err
    train(changed(config, steps=16), run_folder, resume=True)
    assert not capfd.readouterr().err
    log.unlink()
    train(changed(config, steps=18), run_folder, resume=True)
    assert "not what was written until step 16: 0 records" in capfd.readouterr().err
