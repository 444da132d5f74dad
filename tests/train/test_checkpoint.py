"""A checkpoint is whole or absent; damage is named; a failed save takes nothing away."""

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tinyrun import flags, tiny
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from headwater.cli import main
from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint import storage as shards
from headwater.train.data.dataset import prepare
from headwater.train.data.tokenizer import BPETokenizer
from headwater.train.load import load_run
from headwater.train.loop import accumulate, train, update
from headwater.train.monitor.metrics import MetricsLog
from headwater.train.run import begin, save


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny(folder, optimizer="muon", keep=2), folder / "run")
    return folder


@pytest.fixture
def run_folder(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def config(folder: Path, **changes):
    """The configuration of the trained run, whose corpus lies where it was trained."""
    saved = json.loads((folder / "run" / "config.json").read_text())
    original = Path(saved["data"]["source"][0]).parent
    return tiny(original, optimizer="muon", keep=2, **changes)


def test_layout_and_what_is_kept(run_folder):
    kept = checkpoint.checkpoints(run_folder / "run" / "checkpoints")
    assert [folder.name for folder in kept] == ["step-00000010", "step-00000012"]
    files = {path.name for path in kept[-1].iterdir()}
    texts = {"config.json", "state.json", "index.json", "manifest.json"}
    assert files == {"model.safetensors", "optimizer.safetensors", *texts}
    manifest = json.loads((kept[-1] / "manifest.json").read_text())
    assert set(manifest["sha256"]) == files - {"manifest.json"}
    weights = load_file(kept[-1] / "model.safetensors")
    assert "embedding.weight" in weights
    assert "head.weight" not in weights  # tied, stored once
    kinds = {name.split("/")[0] for name in load_file(kept[-1] / "optimizer.safetensors")}
    assert kinds == {"muon", "adamw"}


def test_one_planner_serves_many_saves(tmp_path, monkeypatch):
    """Plans are made once for the same names, shapes and types, and again when there is more to save."""
    plans, real = [], DefaultSavePlanner.create_local_plan

    def create_local_plan(planner):
        plans.append(planner)
        return real(planner)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", create_local_plan)
    planner, tensors = shards.Planner(), {}
    more = {"optimizer/adamw/weight/step": torch.ones(())}
    for step, (change, expected) in enumerate([({}, 1), ({}, 1), (more, 2)]):
        tensors |= {**change, "model/weight": torch.full((3, 2), float(step))}
        folder = checkpoint.save(tmp_path, step, tensors, {}, config=MODEL, keep=1, planner=planner)
        assert len(plans) == expected
        assert checkpoint.damage(folder) is None
        values = {f"model/{k}": v for k, v in load_file(folder / "model.safetensors").items()}
        if change:
            slots = load_file(folder / "optimizer.safetensors")
            values |= {f"optimizer/{name}": value for name, value in slots.items()}
        assert values.keys() == tensors.keys()
        assert all(torch.equal(values[name], value) for name, value in tensors.items())


def events_of_a_save(root: Path, step: int, monkeypatch, **options) -> list[str]:
    """What is synced and renamed, in order."""
    events, sync, rename = [], os.fsync, Path.rename

    def name_of(handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name

    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda handle: (events.append(f"sync {name_of(handle)}"), sync(handle))
        )
        patch.setattr(
            Path,
            "rename",
            lambda old, new: (events.append(f"{old.name} to {new.name}"), rename(old, new)),
        )
        checkpoint.save(
            root, step, {"model/weight": torch.zeros(3, 2)}, {}, config=MODEL, **options
        )
    return events


MODEL = ModelConfig.named("tiny", vocab_size=8)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux which file a handle is")
def test_a_checkpoint_is_on_the_disk_before_it_counts_and_before_an_older_one_goes(
    tmp_path, monkeypatch
):
    root = tmp_path / "checkpoints"
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, dropped in ((1, []), (2, ["step-00000001 to .tmp-old-step-00000001"])):
        final, scratch = f"step-{step:08d}", f".tmp-step-{step:08d}"
        events = events_of_a_save(root, step, monkeypatch, keep=1, before=log.sync)
        files = [
            f"sync {name}"
            for name in ("model.safetensors", "index.json", "config.json", "state.json")
        ]
        commit = [
            "sync manifest.json",
            f"sync {scratch}",
            f"{scratch} to {final}",
            "sync checkpoints",
        ]
        assert events == ["sync metrics.jsonl", *files, *commit, *dropped]
    log.close()


@pytest.mark.parametrize("failing", ["write_file", "_put_in_place"])
def test_a_failing_save_leaves_the_only_checkpoint(tmp_path, monkeypatch, failing):
    """keep=1: the old one goes only when the new one is in its place."""
    checkpoint.save(tmp_path, 1, {"model/weight": torch.zeros(3, 2)}, {}, config=MODEL, keep=1)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards if failing == "write_file" else checkpoint, failing, full)
    with pytest.raises(UserError, match=r"The last good checkpoint is .*step-00000001"):
        checkpoint.save(tmp_path, 2, {"model/weight": torch.ones(3, 2)}, {}, config=MODEL, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_plan_is_made_again_for_another_mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        planner = shards.Planner()
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


def test_a_checkpoint_folder_is_a_model(run_folder):
    model, tokenizer = checkpoint.load_model(run_folder / "run")
    same, _ = checkpoint.load_model(run_folder / "run" / "checkpoints" / "step-00000012")
    tokens = torch.tensor([tokenizer.encode("river").tolist()])
    assert torch.equal(model(tokens), same(tokens))
    assert torch.equal(
        model(tokens), Decoder.load(run_folder / "run" / "checkpoints" / "step-00000012")(tokens)
    )


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "index.json", "state.json", "manifest.json"],
)
@pytest.mark.parametrize("harm", ["truncate", "flip", "delete"])
def test_damage_is_named_and_nothing_is_used_in_silence(run_folder, name, harm):
    newest = run_folder / "run" / "checkpoints" / "step-00000012"
    content = (newest / name).read_bytes()
    if harm == "delete":
        (newest / name).unlink()
    elif harm == "truncate":
        (newest / name).write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        (newest / name).write_bytes(
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        )
    if (name, harm) == ("manifest.json", "flip"):
        name = ""  # what it no longer vouches for depends on the byte
    with pytest.raises(UserError) as caught:
        train(config(run_folder), run_folder / "run", resume=True)
    message = str(caught.value)
    assert "step-00000012 is damaged" in message
    assert name in message
    assert "The last good checkpoint is" in message
    assert "step-00000010" in message

    shutil.rmtree(newest)  # what the message says to do
    assert train(config(run_folder), run_folder / "run", resume=True).steps == 12


def test_every_file_is_hashed_once(run_folder, monkeypatch):
    newest = run_folder / "run" / "checkpoints" / "step-00000012"
    read, real = [], hashlib.file_digest

    def file_digest(file, kind):
        read.append(Path(file.name))
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    files = sorted(path for path in newest.iterdir() if path.name != "manifest.json")
    checkpoint.load_model(run_folder / "run")
    assert sorted(read) == files
    read.clear()
    train(config(run_folder), run_folder / "run", resume=True)
    assert sorted(read) == files
    read.clear()
    (newest / files[0].name).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"good checkpoint is .*step-00000010"):
        checkpoint.load_model(run_folder / "run")
    older = [path for path in read if path.parent != newest]
    assert len(older) == len(set(older)) == len(files)


def test_only_numbered_folders_are_checkpoints_in_the_order_of_numbers(run_folder):
    """A copy that somebody has kept under another name is neither loaded nor counted nor deleted."""
    root = run_folder / "run" / "checkpoints"
    for name in ("step-best", "step-00000012.bak", "step-00000000-keep"):
        shutil.copytree(root / "step-00000010", root / name)
    assert [path.name for path in checkpoint.checkpoints(root)] == [
        "step-00000010",
        "step-00000012",
    ]
    longer = config(run_folder, steps=14)
    train(longer, run_folder / "run", resume=True)
    kept = {path.name for path in root.iterdir()}
    assert kept == {
        *("step-best", "step-00000012.bak", "step-00000000-keep"),
        *("step-00000012", "step-00000014"),
    }
    (root / "step-99999999").mkdir()
    (root / "step-100000000").mkdir()
    assert checkpoint.newest(root).name == "step-100000000"


def test_a_checkpoint_is_of_the_step_that_its_name_says(run_folder):
    root = run_folder / "run" / "checkpoints"
    (root / "step-00000010").rename(root / "step-00000099")
    with pytest.raises(UserError, match=r"step-00000099 is damaged: manifest.json is of step 10"):
        load_run(run_folder / "run")


def test_a_checkpoint_that_is_dropped_while_it_is_read_gives_way_to_the_next(
    run_folder, monkeypatch
):
    root, real = run_folder / "run" / "checkpoints", checkpoint.fill_model
    older = checkpoint.checkpoints(root)[0]
    (root / "step-00000012").rename(run_folder / "later")

    def fill_model(*arguments):
        if older.exists():
            shutil.rmtree(older)
            (run_folder / "later").rename(root / "step-00000012")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "fill_model", fill_model)
    model, _, _ = load_run(run_folder / "run")
    assert torch.equal(model.norm.weight, Decoder.load(root / "step-00000012").norm.weight)


def test_another_tokenizer_than_a_checkpoint_knows_is_refused(run_folder):
    other = {"type": "bytes", "vocab_size": 257, "end_of_text": 255}
    (run_folder / "run" / "tokenizer.json").write_text(json.dumps(other))
    load_run(run_folder / "run")  # whatever it says, a tokenizer of bytes is the same
    letters = BPETokenizer.train(["river sea " * 9], 257)
    letters.save(run_folder / "run")
    with pytest.raises(
        UserError, match=r"tokenizer.json is not the tokenizer that .* trained with"
    ):
        load_run(run_folder / "run")


def test_another_configuration_is_refused_with_the_keys_that_differ(run_folder):
    with pytest.raises(UserError) as caught:
        train(config(run_folder, seed=5, batch_size=8), run_folder / "run", resume=True)
    message = str(caught.value)
    assert "train.seed: 0 there, 5 asked for" in message
    assert "train.batch_size: 4 there, 8 asked for" in message
    assert "train.steps" not in message
    free = {
        "save_every": 7,
        "log_every": 3,
        "accumulate": 2,
        "checkpoint_activations": True,
        "compile": "model",
    }
    train(config(run_folder, **free), run_folder / "run", resume=True)


def test_another_text_is_refused_with_the_setting_before_what_follows_from_it(run_folder):
    """And not with the advice to leave its flag out alone: its file may be called otherwise now."""
    (run_folder / "other.txt").write_text("one two three four\n" * 2000)
    asked = config(run_folder)
    asked = replace(asked, data=replace(asked.data, source=(str(run_folder / "other.txt"),)))
    keys = r"data.source: .* asked for\n  corpus.source_hash: "
    with pytest.raises(UserError, match=rf"other text:\n  {keys}"):
        train(asked, run_folder / "run", resume=True)


def fill_disk(monkeypatch, file_name: str) -> None:
    real = shards.write_file

    def write_file(path: Path, content) -> str:
        if path.name == file_name:
            path.write_bytes(b"the first ten")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, content)

    monkeypatch.setattr(shards, "write_file", write_file)


@pytest.mark.parametrize(
    "file_name", ["model.safetensors", "optimizer.safetensors", "manifest.json"]
)
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, file_name):
    run = begin(tiny(tmp_path), tmp_path / "run", resume=False)
    first = save(run)
    update(run, 1, accumulate(run, 1))  # now the optimizer has something to save
    run.step = 1
    fill_disk(monkeypatch, file_name)
    with pytest.raises(
        UserError,
        match=r"could not write .*step-00000001: No space left.*good checkpoint is .*00000000",
    ):
        save(run)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert checkpoint.damage(first) is None


def test_a_disk_that_is_really_full(tmp_path, small_disk, capfd):
    big = tiny(tmp_path, keep=50, save_every=1)
    prepare(big.data)
    capfd.readouterr()
    code = main([*flags(big, tmp_path / "run"), "--out", str(small_disk / "run")])
    message = capfd.readouterr().err
    assert code == 1
    assert message.startswith("headwater: could not write the checkpoint")
    assert "No space left on device" in message
    assert "The last good checkpoint is" in message
    kept = checkpoint.checkpoints(small_disk / "run" / "checkpoints")
    assert kept
    assert all(checkpoint.damage(folder) is None for folder in kept)
    assert not list((small_disk / "run" / "checkpoints").glob(".tmp-*"))

    for folder in kept[:-1]:  # make room, as the message says
        shutil.rmtree(folder)
    assert (
        main(
            [
                *flags(big, tmp_path / "run"),
                "--out",
                str(small_disk / "run"),
                "--resume",
                "--keep",
                "1",
            ]
        )
        == 0
    )


def test_leftovers_of_a_killed_process_are_swept(run_folder):
    root = run_folder / "run" / "checkpoints"
    (root / ".tmp-step-00000099").mkdir()
    (root / ".tmp-step-00000099" / "model.safetensors").write_bytes(b"half")
    train(config(run_folder), run_folder / "run", resume=True)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010", "step-00000012"]
