"""W&B and TensorBoard see what metrics.jsonl has; one that is missing, raises or hangs leaves training as it was."""

import importlib.util
import sys
import threading
import types
from pathlib import Path

import pytest
from tinyrun import fingerprint, go_back, records, tiny

from headwater.errors import UserError
from headwater.train.loop import train
from headwater.train.monitor import loggers


def fake_wandb(monkeypatch, log, init=lambda: None) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(inits=[], finished=0)

    def start(**options):
        fake.inits.append(options)
        init()
        return types.SimpleNamespace(log=log, finish=finish)

    def finish():
        fake.finished += 1

    fake.init = start
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def numbers(out: Path) -> dict[tuple[str, int], float]:
    """Every scalar of metrics.jsonl by name and step."""
    values = {}
    for record in records(out):
        for name, value in loggers.scalars(record):
            values[name, record["step"]] = value
    return values


@pytest.mark.parametrize("extra", ["wandb", "tensorboard"])
def test_a_missing_package_is_named_before_any_work(tmp_path, monkeypatch, extra):
    module = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}[extra]
    monkeypatch.setitem(sys.modules, module, None)
    config = tiny(tmp_path, **{extra: "rivers" if extra == "wandb" else True})
    with pytest.raises(UserError, match=rf"{extra} .*pip install 'headwater\[{extra}\]'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numbers_of_a_record():
    record = {"kind": "depth", "step": 3, "tokens": 8, "sublayers": ["mlp"]}
    record |= {"entropy": [0.5, None], "mixing": [[1.0]]}
    assert dict(loggers.scalars(record)) == {"depth/tokens": 8.0, "depth/entropy/00": 0.5}


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs headwater[tensorboard]"
)
def test_tensorboard_shows_what_the_metrics_say_after_a_resume_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    train(tiny(tmp_path, tensorboard=True), out)
    go_back(out, 5)
    train(tiny(tmp_path, tensorboard=True), out, resume=True)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = {
        (tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)
    }
    assert shown == pytest.approx(numbers(out), rel=1e-6)
    (event,) = events.Tensors("settings/text_summary")[:1]
    text = event.tensor_proto.string_val[0].decode()
    assert '| model.residual | `"attnres-block:block=2"` |' in text
    assert "| train.steps | `12` |" in text
    depths = records(out, "depth")
    pictures = {event.step: event for event in events.Images("depth/mixing")}
    assert sorted(pictures) == sorted({record["step"] for record in depths})
    rows = len(depths[0]["mixing"])
    assert all((event.width, event.height) == (12 * rows, 12 * rows) for event in pictures.values())


def test_the_picture_of_a_map():
    pixels = loggers.picture([[2.0, 0.0], [0.5, -1.0]], cell=2)
    assert pixels.shape == (4, 4, 3)
    assert pixels[::2, ::2].tolist() == [
        [[8, 69, 148], [255, 255, 255]],
        [[132, 162, 202], [165, 15, 21]],
    ]
    assert (loggers.picture([[None, 0.0]]) == 255).all()


def test_wandb_is_told_everything_and_goes_on_under_the_same_name(tmp_path, monkeypatch):
    values_told = {}

    def log(values, step):
        values_told.update({(name, step): value for name, value in values.items()})

    fake = fake_wandb(monkeypatch, log)
    config, out = tiny(tmp_path, wandb="rivers"), tmp_path / "run"
    train(config, out)
    assert values_told == numbers(out)
    assert fake.finished == 1
    (out / "summary.json").unlink()
    train(config, out, resume=True)
    first, second = fake.inits
    assert first["project"] == "rivers"
    assert first["config"]["train"]["steps"] == 12
    assert first["id"] == second["id"]


@pytest.mark.parametrize("harm", ["raises", "raises at the start", "hangs", "hangs at the start"])
def test_a_logger_that_fails_or_hangs_never_touches_training(tmp_path, monkeypatch, capfd, harm):
    plain = tmp_path / "plain"
    train(tiny(tmp_path), plain)
    calls, never = [], threading.Event()

    def trouble(*_, **__):
        calls.append(1)
        if harm.startswith("raises"):
            raise RuntimeError("no connection")
        never.wait()

    if harm.endswith("start"):
        fake_wandb(monkeypatch, print, init=trouble)
    else:
        fake_wandb(monkeypatch, trouble)
    monkeypatch.setattr(loggers, "CAPACITY", 3)
    monkeypatch.setattr(loggers, "PATIENCE", 0.2)
    train(tiny(tmp_path, wandb="rivers"), tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(plain)
    assert len(calls) == 1
    warnings = [line for line in capfd.readouterr().err.splitlines() if "W&B" in line]
    if harm.startswith("raises"):
        assert len(warnings) == 1
        assert (
            "failed and is off for the rest of this run (RuntimeError: no connection)"
            in warnings[0]
        )
    else:
        assert ["too slow" in line for line in warnings] == [True, False]
        assert "left behind" in warnings[1]
    never.set()
