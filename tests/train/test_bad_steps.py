"""Steps that are not finite, or spikes: left out or the end of a run, and never in a checkpoint."""

import math

import numpy as np
import pytest
import torch
from disturbed import bad_steps, each_step, power_cut
from tinyrun import STEPS, checkpoint_of, fingerprint, logged, records, saved_steps, tiny

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.runs.files import read_json
from headwater.runs.settings import TrainSettings
from headwater.train.checkpoint.folder import damage
from headwater.train.loop import train
from headwater.train.monitor.bad_steps import Skips


def test_each_kind_of_bad_step_has_its_own_count():
    settings = TrainSettings(skip_nonfinite=2, skip_spikes=2, spike_window=2)
    # After equal losses a small rise is no spike.
    threshold = Skips(losses=[2.0] * 2).judge(2.1, 1.0, settings).threshold
    assert threshold == pytest.approx(2.0 + 6 * 0.002)
    skips = Skips(losses=[1.0, 1.1])
    for loss, norm, kind, count in (
        (99.0, 1.0, "spike", 1),
        (99.0, 1.0, "spike", 2),
        (math.nan, 1.0, "nonfinite", 1),
        (1.0, math.inf, "nonfinite", 2),
        (99.0, 1.0, "spike", 1),
        (1.0, 1.0, None, 0),
    ):
        reason = skips.judge(loss, norm, settings)
        assert (reason and reason.kind, skips.in_a_row) == (kind, count)
    assert skips.total == 5


def test_a_run_that_a_bad_batch_has_stopped_goes_on_as_its_message_says(tmp_path, monkeypatch):
    out = tmp_path / "run"
    bad_steps(monkeypatch, 8, factor=math.nan)
    advice = "resume and train.skip_nonfinite = 1 .*lower optim.lr"
    message = rf"not finite at step 8 .*last good checkpoint is .*step-00000005.*{advice}"
    with pytest.raises(UserError, match=message):
        train(tiny(tmp_path), out)
    assert "not finite at step 8" in read_json(out / "diverged.json")["why"]
    assert saved_steps(out) == [5]
    assert damage(checkpoint_of(out, 5)) is None
    model = Decoder.load(checkpoint_of(out, 5))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert train(tiny(tmp_path, skip_nonfinite=1), out, resume=True).skipped_steps == 1
    assert not (out / "diverged.json").exists()

    bad_steps(monkeypatch, 7, 8)
    window = {"spike_window": 4}
    with pytest.raises(UserError, match=r"above .* at step 8 .*resume and train.skip_spikes = 2"):
        train(tiny(tmp_path, skip_spikes=1, **window), tmp_path / "spikes")
    config = tiny(tmp_path, skip_spikes=2, spike_sigmas=5.0, **window)
    assert train(config, tmp_path / "spikes", resume=True).skipped_steps == 2


def test_a_loss_spike_is_left_out_and_a_resumed_run_decides_alike(tmp_path, monkeypatch):
    config = tiny(tmp_path, save_every=1, keep=99, skip_spikes=2, spike_window=4)
    whole, weights = tmp_path / "whole", {}
    # The first spike comes before there are losses to measure it against.
    bad_steps(monkeypatch, 3, 7, 8)

    def keep(run):
        vector = torch.nn.utils.parameters_to_vector(run.model.parameters())
        weights[run.step] = vector.detach()

    with monkeypatch.context() as patch:
        each_step(patch, keep)
        assert train(config, whole).skipped_steps == 2
    first, second = records(whole, "skip")
    for record, step in ((first, 7), (second, 8)):
        assert (record["step"], record["reason"]) == (step, "spike")
    window = logged(whole, "loss")[2:6]
    middle = np.median(window)
    deviation = 1.4826 * np.median(np.abs(window - middle))
    assert first["threshold"] == second["threshold"] == pytest.approx(middle + 6 * deviation)
    assert first["loss"] > first["threshold"]
    for step in range(2, 13):
        assert torch.equal(weights[step], weights[step - 1]) == (step in (7, 8)), step
    assert saved_steps(whole) == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
    cause = read_json(whole / "spike-step-7.json")
    assert cause["batch"] == {"seed": 0, "step": 6, "size": 4}

    for step in (6, 8):  # with a window half filled, and between two spikes
        out = tmp_path / f"cut{step}"
        with power_cut(step):
            train(config, out)
        train(config, out, resume=True)
        assert fingerprint(out) == fingerprint(whole)


@pytest.mark.parametrize("loss", [9.01, 0.0])
def test_a_run_that_no_longer_learns_stops_unless_it_has_learned_all(loss, tmp_path, monkeypatch):
    """A stream that has overflowed does this: a norm makes zeros of it, and the loss is that of a guess."""
    bad_steps(monkeypatch, *range(8, STEPS + 1), factor=0.0, loss=loss)
    config, out = tiny(tmp_path, log_every=4), tmp_path / "run"
    if not loss:
        assert train(config, out).steps == STEPS
        return
    message = r"the gradient is zero at step 8 \(loss 9\.0100\).*lower optim.lr"
    with pytest.raises(UserError, match=message):
        train(config, out)
    assert "gradient is zero" in read_json(out / "diverged.json")["why"]


@pytest.mark.parametrize("place", ["weights", "optimizer"])
def test_what_is_not_finite_is_never_saved(tmp_path, monkeypatch, place):
    """A number that has gone bad in memory, which neither loss nor gradient shows."""

    def spoil(run):
        if run.step != 7:
            return
        weight = run.whole.embedding.weight
        moment = run.optimizers["adamw"].state[weight]["exp_avg"]
        with torch.no_grad():
            # Of a token that the text does not have
            (weight if place == "weights" else moment)[-1, 0] = math.inf

    each_step(monkeypatch, spoil)
    config = tiny(tmp_path, save_every=1, keep=2, eval_every=99, tie_embeddings=False)
    with pytest.raises(UserError, match=r"not finite after step 7\. The last good .*step-00000006"):
        train(config, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [5, 6]
    assert (tmp_path / "run" / "diverged.json").exists()
