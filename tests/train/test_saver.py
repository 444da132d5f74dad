"""Saving in the background: the same files, later; a failure stops the run."""

import gc
import threading
import time
import weakref

import pytest
import torch
from disturbed import each_file, each_step, no_space, power_cut
from tinyrun import changed, checkpoint_of, fingerprint, read_all, saved_steps, tiny

from headwater.errors import UserError
from headwater.train.checkpoint import storage
from headwater.train.checkpoint.folder import damage
from headwater.train.checkpoint.saver import HostBuffers
from headwater.train.distributed.parts import local
from headwater.train.loop import accumulate, train, update
from headwater.train.run import begin, save

FILES = ("model.safetensors", "optimizer.safetensors", "index.json")


def slow_writes(monkeypatch, *, seconds=0.0, failing=1000):
    """Weights take some seconds to write; from a step on, the disk is full."""

    def act(path):
        if path.name == "model.safetensors":
            time.sleep(seconds)
            if int(path.parent.name.rpartition("-")[2]) >= failing:
                no_space(path)

    each_file(monkeypatch, act)


def test_saving_in_the_background_writes_what_saving_at_once_does(tmp_path, monkeypatch):
    """Each save takes longer than the steps meanwhile, which must neither wait for it nor change what it writes."""
    config = tiny(tmp_path, save_every=3, keep=99)
    at_once, behind = tmp_path / "sync", tmp_path / "async"
    train(config, at_once)
    slow_writes(monkeypatch, seconds=0.5)
    overtaken = []

    def look(run):
        thread = run.saver.thread
        overtaken.append(thread is not None and thread.is_alive())

    each_step(monkeypatch, look)
    train(changed(config, async_save=True), behind)
    assert any(overtaken)
    assert saved_steps(behind) == saved_steps(at_once) == [3, 6, 9, 12]
    for step in saved_steps(behind):
        one, other = checkpoint_of(at_once, step), checkpoint_of(behind, step)
        assert damage(other) is None
        for file in FILES:
            assert (one / file).read_bytes() == (other / file).read_bytes(), (step, file)
    assert fingerprint(at_once) == fingerprint(behind)


def test_copies_for_the_background_are_written_in_few_pieces(monkeypatch):
    monkeypatch.setattr(HostBuffers, "BLOCK", 100)
    tensors = {
        "b": torch.randn(5),
        "half": torch.randn(3).bfloat16(),
        "a": torch.randn(2, 3),
        "count": torch.arange(3, dtype=torch.int64),
        "large": torch.randn(40),
    }
    buffers = HostBuffers()
    copies = buffers.take(tensors)
    # The next save has its copies in the same place.
    place = copies["a"].data_ptr()
    tensors["a"] += 1
    assert buffers.take(tensors)["a"].data_ptr() == place
    parts = list(storage.encode(copies))
    assert b"".join(parts) == b"".join(storage.encode(tensors))
    # Count, a and b; large, by itself; half
    assert [len(part) for part in parts[1:]] == [24 + 24 + 20, 160, 6]
    blocks = {copies[name].untyped_storage().data_ptr() for name in ("half", "count")}
    assert len(blocks) == 1


@pytest.fixture
def run(tmp_path):
    run = begin(tiny(tmp_path, async_save=True), tmp_path / "run", resume=False)
    yield run
    run.log.close()


def take_step(run, number):
    update(run, number, accumulate(run, number))
    run.step = number


def test_a_save_keeps_plans_and_no_tensors(run):
    save(run)  # before the optimizer has any state
    run.saver.wait()
    before = weakref.ref(next(iter(run.saver.buffers.buffers.values())))
    take_step(run, 1)
    save(run)
    run.saver.wait()
    gc.collect()
    assert before() is None
    assert run.saver.planner.own is not None
    moment = weakref.ref(next(iter(run.optimizers["adamw"].state.values()))["exp_avg"])
    run.optimizers["adamw"].state.clear()
    gc.collect()
    assert moment() is None


class LateBuffers(HostBuffers):
    """Copies as a GPU makes them: they happen when another stream gets to them, here when the update asks for them."""

    def take(self, tensors):
        self.live = {name: local(tensor) for name, tensor in tensors.items()}
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in self.live.items()}
        self.happened, self.copied = threading.Event(), self
        return self.buffers

    def wait_event(self, event):
        assert event is self
        for name, tensor in self.live.items():
            self.buffers[name].copy_(tensor)
        self.happened.set()

    def synchronize(self):
        assert self.happened.wait(10), "no update asked for the copies"


def test_a_late_copy_is_waited_for_by_the_next_update_and_by_the_file(run, monkeypatch):
    run.saver.buffers = LateBuffers()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: run.saver.buffers)
    take_step(run, 1)
    weights = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    save(run)
    take_step(run, 2)
    run.saver.wait()
    written = read_all(checkpoint_of(run.folder, 1), "model")
    moved = []
    for name, parameter in run.model.named_parameters():
        assert torch.equal(written[name], weights[name]), name
        moved.append(not torch.equal(parameter, weights[name]))
    assert any(moved)


def test_a_failing_write_stops_the_run_at_one_of_the_next_steps(tmp_path, monkeypatch):
    rare = {"eval_every": 200, "depth_every": 200, "save_every": 50}
    slow_writes(monkeypatch, failing=100)
    message = r"could not write .*step-00000100: No space left.*good .*step-00000050"
    with pytest.raises(UserError, match=message):
        train(tiny(tmp_path, steps=200, **rare, async_save=True), tmp_path / "run")
    last = fingerprint(tmp_path / "run")["metrics"][-1]["step"]
    assert last < 150, "it was noticed by the next save only"
    assert saved_steps(tmp_path / "run") == [50]


@pytest.mark.parametrize("steps", [5, 12])
def test_a_failing_last_write_is_an_error(tmp_path, monkeypatch, steps):
    """At the end of a run, and when another error has already ended it."""
    config, out = tiny(tmp_path, steps=steps, async_save=True), tmp_path / "run"
    slow_writes(monkeypatch, seconds=0.3, failing=5)
    if steps == 5:
        with pytest.raises(UserError, match="could not write"):
            train(config, out)
    else:
        with power_cut(6):  # the write has yet to fail
            train(config, out)
    assert not (out / "summary.json").exists()
    assert saved_steps(out) == []
