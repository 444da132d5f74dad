"""A checkpoint is whole or absent; damage is named; a failed save takes nothing away."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from disturbed import each_file, no_space
from safetensors.torch import load_file as load_tensors
from tinyrun import changed, checkpoint_of, saved_steps, tiny
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.runs.files import read_json
from headwater.runs.settings import load_file
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint import storage
from headwater.train.data.tokenizer import BPETokenizer
from headwater.train.files import write_json
from headwater.train.load import load_run
from headwater.train.loop import accumulate, train, update
from headwater.train.monitor.metrics import MetricsLog
from headwater.train.run import begin, save

MODEL = ModelConfig.named("tiny", vocab_size=8)
ZEROS = {"model/weight": torch.zeros(3, 2)}
TEXTS = {"config.json", "state.json", "index.json", "manifest.json"}


def save_tensors(root, step, tensors=None, **options):
    return checkpoint.save(root, step, tensors or ZEROS, {}, config=MODEL, keep=1, **options)


def test_layout_and_what_is_kept(finished):
    assert saved_steps(finished) == [10, 12]
    folder = checkpoint_of(finished)
    files = {path.name for path in folder.iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", *TEXTS}
    assert set(read_json(folder / "manifest.json")["sha256"]) == files - {"manifest.json"}
    weights = load_tensors(folder / "model.safetensors")
    assert "embedding.weight" in weights
    assert "head.weight" not in weights  # tied, stored once
    slots = load_tensors(folder / "optimizer.safetensors")
    assert {name.split("/")[0] for name in slots} == {"muon", "adamw"}


def test_one_planner_serves_many_saves(tmp_path, monkeypatch):
    """Plans are made once for the same names, shapes and types, and again when there is more to save."""
    plans, real = [], DefaultSavePlanner.create_local_plan

    def create_local_plan(planner):
        plans.append(planner)
        return real(planner)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", create_local_plan)
    planner, slots = storage.Planner(), {}
    for step, expected in enumerate([1, 1, 2]):
        if step == 2:
            slots["adamw/weight/step"] = torch.ones(())
        weight = torch.full((3, 2), float(step))
        tensors = {f"optimizer/{name}": value for name, value in slots.items()}
        tensors["model/weight"] = weight
        folder = save_tensors(tmp_path, step, tensors, planner=planner)
        assert len(plans) == expected
        assert checkpoint.damage(folder) is None
        assert torch.equal(load_tensors(folder / "model.safetensors")["weight"], weight)
    assert load_tensors(folder / "optimizer.safetensors") == slots


def test_a_plan_is_made_again_for_another_mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        planner = storage.Planner()
        for ranks, known in ([0, 1], False), ([0, 1], True), ([1, 0], False):
            mesh = DeviceMesh("cpu", ranks)
            rows = DTensor.from_local(torch.zeros(1, 2), mesh, [Shard(0)], run_check=False)
            planner.bring({"model/weight": rows}, {})
            assert (planner.own is not None) == known, ranks
            planner.set_up_planner({})
            planner.create_local_plan()
            planner.release_tensors()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux which file a handle is")
def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_an_older_one_goes(
    tmp_path, monkeypatch
):
    root, events = tmp_path / "checkpoints", []
    sync, rename = os.fsync, Path.rename

    def record_sync(handle):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def record_rename(old, new):
        events.append(f"{old.name} to {new.name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    events.clear()
    save_tensors(root, 1, before=log.sync)
    save_tensors(root, 2, before=log.sync)
    log.close()
    files = "metrics.jsonl model.safetensors index.json config.json state.json manifest.json"
    for step, dropped in ((1, []), (2, ["step-00000001 to .tmp-old-step-00000001"])):
        scratch = f".tmp-step-{step:08d}"
        synced = [f"sync {name}" for name in [*files.split(), scratch]]
        commit = [f"{scratch} to step-{step:08d}", "sync checkpoints", *dropped]
        expected = [*synced, *commit]
        assert events[: len(expected)] == expected
        del events[: len(expected)]
    assert not events


def test_a_failing_save_leaves_the_only_checkpoint(tmp_path, monkeypatch):
    """keep=1: the old one goes only when the new one is in its place."""
    save_tensors(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "_put_in_place", no_space)
    with pytest.raises(UserError, match=r"The last good checkpoint is .*step-00000001"):
        save_tensors(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, name):
    run = begin(tiny(tmp_path), tmp_path / "run", resume=False)
    first = save(run)
    update(run, 1, accumulate(run, 1))  # now the optimizer has something to save
    run.step = 1

    def fill_disk(path):
        if path.name == name:
            path.write_bytes(b"the first ten")
            no_space(path)

    each_file(monkeypatch, fill_disk)
    message = r"could not write .*step-00000001: No space left.*good checkpoint is .*00000000"
    with pytest.raises(UserError, match=message):
        save(run)
    assert saved_steps(run.folder) == [0]
    assert checkpoint.damage(first) is None


def test_a_checkpoint_folder_is_a_model(finished):
    folder = checkpoint_of(finished)
    model, tokenizer = checkpoint.load_model(finished)
    same, _ = checkpoint.load_model(folder)
    tokens = torch.tensor([tokenizer.encode("river").tolist()])
    assert torch.equal(model(tokens), same(tokens))
    assert torch.equal(model(tokens), Decoder.load(folder)(tokens))


def harmed(content: bytes, harm: str) -> bytes:
    middle = len(content) // 2
    if harm == "truncate":
        return content[:middle]
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "harm", "named"),
    [
        ("model.safetensors", "truncate", "model.safetensors"),
        ("optimizer.safetensors", "flip", "optimizer.safetensors"),
        ("index.json", "delete", "index.json is missing"),
        ("state.json", "flip", "state.json"),
        ("manifest.json", "truncate", "manifest.json is not what was written"),
        ("manifest.json", "flip", ""),  # what it no longer vouches for depends on the byte
        ("manifest.json", "delete", "manifest.json is missing"),
    ],
)
def test_damage_is_named_and_nothing_is_used_in_silence(run_folder, name, harm, named):
    config, newest = load_file(run_folder), checkpoint_of(run_folder)
    path = newest / name
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(harmed(path.read_bytes(), harm))
    message = rf"step-00000012 is damaged: .*{named}.*The last good checkpoint is .*step-00000010"
    with pytest.raises(UserError, match=message):
        train(config, run_folder, resume=True)
    shutil.rmtree(newest)  # what the message says to do
    assert train(config, run_folder, resume=True).steps == 12


def test_every_file_is_hashed_once(run_folder, monkeypatch):
    newest, hashed, real = checkpoint_of(run_folder), [], hashlib.file_digest

    def file_digest(file, kind):
        hashed.append(Path(file.name))
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    files = sorted(path for path in newest.iterdir() if path.name != "manifest.json")
    config = load_file(run_folder)
    for act in (checkpoint.load_model, lambda run: train(config, run, resume=True)):
        hashed.clear()
        act(run_folder)
        assert sorted(hashed) == files
    hashed.clear()
    files[0].write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"good checkpoint is .*step-00000010"):
        checkpoint.load_model(run_folder)
    older = [path for path in hashed if path.parent != newest]
    assert len(older) == len(set(older)) == len(files)


def test_only_numbered_folders_are_checkpoints_in_the_order_of_numbers(run_folder):
    """A copy that somebody has kept under another name is neither loaded nor counted nor deleted; what a killed
    process left half written goes."""
    root = run_folder / "checkpoints"
    copies = {"step-best", "step-00000012.bak", "step-00000000-keep"}
    for name in (*copies, ".tmp-step-00000099"):
        shutil.copytree(checkpoint_of(run_folder, 10), root / name)
    assert [path.name for path in checkpoint.checkpoints(root)] == [
        "step-00000010",
        "step-00000012",
    ]
    train(changed(load_file(run_folder), steps=14), run_folder, resume=True)
    kept = {path.name for path in root.iterdir()}
    assert kept == {*copies, "step-00000012", "step-00000014"}
    for name in ("step-99999999", "step-100000000"):
        (root / name).mkdir()
    assert checkpoint.newest(root).name == "step-100000000"


def test_a_checkpoint_is_of_the_step_that_its_name_says(run_folder):
    checkpoint_of(run_folder, 10).rename(checkpoint_of(run_folder, 99))
    with pytest.raises(UserError, match=r"step-00000099 is damaged: manifest.json is of step 10"):
        load_run(run_folder)


def test_a_checkpoint_that_is_dropped_while_it_is_read_gives_way_to_the_next(
    run_folder, monkeypatch
):
    older, newest = checkpoint_of(run_folder, 10), checkpoint_of(run_folder)
    later, real = run_folder / "later", checkpoint.fill_model
    newest.rename(later)

    def fill_model(*arguments):
        if older.exists():
            shutil.rmtree(older)
            later.rename(newest)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "fill_model", fill_model)
    weight = load_run(run_folder).model.norm.weight
    assert torch.equal(weight, Decoder.load(newest).norm.weight)


def test_another_tokenizer_than_a_checkpoint_knows_is_refused(run_folder):
    other = {"type": "bytes", "vocab_size": 257, "end_of_text": 255}
    write_json(run_folder / "tokenizer.json", other)
    load_run(run_folder)  # whatever it says, a tokenizer of bytes is the same
    BPETokenizer.train(["river sea " * 9], 257).save(run_folder)
    message = r"tokenizer.json is not the tokenizer that .* trained with"
    with pytest.raises(UserError, match=message):
        load_run(run_folder)
