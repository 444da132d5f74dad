"""Checkpoints of several ranks: read under any other layout, whole or absent, and nothing in them is ever run."""

import hashlib
import json
import os
import pickle
import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import spawn
from safetensors import SafetensorError
from tinyrun import fingerprint, read_all, tiny
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headwater.cli import main
from headwater.errors import UserError
from headwater.models import Decoder
from headwater.runs.settings import Config, ParallelSettings
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint import storage as shards
from headwater.train.distributed.ranks import join
from headwater.train.loop import train
from headwater.train.run import begin, save, with_vocabulary

STEPS = 6


def settings(folder: Path, **parallel) -> Config:
    """Muon for the matrices, AdamW for the rest: both optimizers are in every checkpoint."""
    sizes = {"batch_size": 8, "accumulate": 2, "steps": STEPS, "save_every": 1, "keep": 9}
    config = tiny(folder, optimizer="muon", **sizes, log_every=1, eval_every=3)
    model = replace(config.model, kv_heads=2)  # which two ranks can divide
    return replace(config, model=model, parallel=ParallelSettings(hang_timeout=60, **parallel))


def run_and_resume(config: Config, folder: Path) -> None:
    """A whole run, and copies of it that lost everything after each of their steps and went on. Every other one of them
    saves in the background."""
    ranks = join(config.parallel, torch.device("cpu"))  # once for all runs
    train(config, folder / "whole")
    for step in range(1, STEPS):
        out = folder / f"from-{step}"
        if ranks.main:
            shutil.copytree(folder / "whole", out)
            for later in checkpoint.checkpoints(out / "checkpoints")[step:]:
                shutil.rmtree(later)
            (out / "summary.json").unlink()
        ranks.barrier()
        in_background = replace(config.train, async_save=step % 2 == 0)
        train(replace(config, train=in_background), out, resume=True)


def reshard(config: Config, source: Path, target: Path) -> None:
    """Load what another layout saved, and save it again."""
    ranks = join(config.parallel, torch.device("cpu"))
    run = begin(config, source, resume=True, ranks=ranks)
    run.saver.root = target / "checkpoints"
    save(run)
    run.log.close()


PLACEMENTS = {  # over a grid of two by two, and over two ranks
    "columns": ((Replicate(), Shard(1)), Shard(0)),
    "rows-and-columns": ((Shard(0), Shard(1)), Shard(1)),
    "rows-twice": ((Shard(0), Shard(0)), Replicate()),  # more ranks than rows: one of them has none
    "copies": ((Replicate(), Replicate()), Shard(1)),
}


def whole_tensors() -> dict[str, torch.Tensor]:
    sizes = {"rows-twice": (3, 5)}
    return {
        f"model/{name}": torch.arange(35.0).view(7, 5)[: sizes.get(name, (7,))[0]].clone()
        for name in PLACEMENTS
    }


def divide(grid: DeviceMesh, which: int) -> dict[str, torch.Tensor]:
    chosen = {f"model/{name}": pair[which] for name, pair in PLACEMENTS.items()}
    return {
        name: distribute_tensor(value, grid, list(chosen[name]) if which == 0 else [chosen[name]])
        for name, value in whole_tensors().items()
    }


def save_on_four(config: Config, folder: Path) -> None:
    ranks = join(config.parallel, torch.device("cpu"))
    train(config, folder / "four")
    if ranks.main:
        shutil.copytree(folder / "four", folder / "source")
    ranks.barrier()
    divided = replace(config, parallel=replace(config.parallel, pipeline=1, chunks=1, tensor=2))
    reshard(divided, folder / "source", folder / "tensor")
    tensors = divide(init_device_mesh("cpu", (2, 2)), 0)
    tensors["model/plain"] = torch.arange(4.0)  # on all four, written by one
    model = with_vocabulary(config.model, 257)
    checkpoint.save(folder / "grid", 1, tensors, {}, config=model, keep=1, ranks=ranks)


def read_on_two(config: Config, folder: Path) -> None:
    # As a file system of several machines may answer: the main rank's word counts
    if os.environ["RANK"] == "1":
        checkpoint.checkpoints = lambda root: []
    reshard(config, folder / "source", folder / "two")
    refuse_truncated(config, folder)
    reader = shards.Reader(folder / "grid" / "step-00000001")
    expected, found = whole_tensors(), divide(init_device_mesh("cpu", (2,)), 1)
    for value in found.values():
        value.to_local().zero_()
    shards.read(reader, found, alone=False)
    for name, value in found.items():
        assert torch.equal(value.full_tensor(), expected[name]), name


def refuse_truncated(config: Config, folder: Path) -> None:
    """The ranks divide the files to check among them; whoever meets a short one, both refuse."""
    ranks = join(config.parallel, torch.device("cpu"))
    for position in range(2):
        target = folder / f"cut-{position}" / "step-00000006"
        if ranks.main:
            shutil.copytree(newest(folder / "four"), target)
            victim = (
                target
                / list(json.loads((target / "manifest.json").read_text())["sha256"])[position]
            )
            victim.write_bytes(victim.read_bytes()[:-1])
        ranks.barrier()
        with pytest.raises(UserError, match=r"is damaged: .*safetensors is not what was written"):
            checkpoint.verify(target, ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Six steps on four ranks (two stages of two chunks, each on two shards), read by four that divide rows and columns
    (tensor parallel, and two shards), and then by two shards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    spawn(4, save_on_four, settings(folder, pipeline=2, chunks=2), folder)
    shutil.rmtree(folder / "source" / "checkpoints")
    shutil.copytree(folder / "tensor" / "checkpoints", folder / "source" / "checkpoints")
    spawn(2, read_on_two, settings(folder), folder)
    return folder


def newest(run: Path) -> Path:
    return checkpoint.checkpoints(run / "checkpoints")[-1]


@pytest.mark.slow
def test_four_ranks_to_two_to_one(folder, tmp_path):
    four, tensor, two = (newest(folder / name) for name in ("four", "tensor", "two"))
    entries = json.loads((tensor / "index.json").read_text())["tensors"]
    # Two of rows, two of columns
    assert len(entries["model/sublayers.1.body.output.weight"]["pieces"]) == 4
    assert {path.name for path in two.glob("model*")} == {
        "model-00000.safetensors",
        "model-00001.safetensors",
    }
    shutil.copytree(folder / "four", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(two, tmp_path / "one" / "checkpoints" / two.name)
    run = begin(config_of(folder), tmp_path / "one", resume=True)
    one = save(run)
    assert (one / "model.safetensors").exists()
    for kind in ("model", "optimizer"):
        expected = read_all(four, kind)
        for path in (tensor, two, one):
            found = read_all(path, kind)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), path


@pytest.mark.slow
def test_one_process_goes_on_with_what_four_began_as_the_manual_says(
    folder, tmp_path, capfd, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = Path(shutil.copytree(folder / "four", tmp_path / "run"))
    shutil.rmtree(newest(out))
    (out / "summary.json").unlink()
    resume = ["train", "--out", str(out), "--resume"]
    assert main(resume) == 1
    assert "A run resumed by one process needs --pipeline 1 --tensor 1" in capfd.readouterr().err
    assert (
        main(
            [
                *resume,
                "--pipeline",
                "1",
                "--tensor",
                "1",
                "--accumulate",
                "1",
                "--checkpoint-activations",
            ]
        )
        == 0
    )
    one, four = (json.loads((run / "summary.json").read_text()) for run in (out, folder / "four"))
    assert one["steps"] == STEPS
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)


@pytest.mark.slow
def test_any_division_of_a_tensor_is_read_by_any_other(folder):
    """Rows, columns, both and copies over a grid of four ranks: two have read them otherwise already; here one does."""
    saved = folder / "grid" / "step-00000001"
    assert checkpoint.damage(saved) is None
    index = json.loads((saved / "index.json").read_text())["tensors"]
    pieces = {name.removeprefix("model/"): len(entry["pieces"]) for name, entry in index.items()}
    assert pieces == {"columns": 2, "rows-and-columns": 4, "rows-twice": 3, "copies": 1, "plain": 1}
    found = read_all(saved, "model")
    for name, value in whole_tensors().items():
        assert torch.equal(found[name.removeprefix("model/")], value), name


def config_of(folder: Path) -> Config:
    """As `settings`, without touching the corpus, whose times name its cache."""
    saved = json.loads((folder / "four" / "config.json").read_text())
    return Config().over({**saved, "parallel": {}})


@pytest.mark.slow
def test_stop_and_resume_at_five_places(tmp_path):
    spawn(2, run_and_resume, settings(tmp_path, pipeline=2, chunks=2), tmp_path)
    whole = fingerprint(tmp_path / "whole")
    for step in range(1, STEPS):
        assert fingerprint(tmp_path / f"from-{step}") == whole


@pytest.mark.slow
def test_the_model_of_a_sharded_checkpoint(folder, tmp_path):
    model, _ = checkpoint.load_model(folder / "four")
    again, _ = checkpoint.load_model(newest(folder / "four"))
    weights = again.weights()
    assert all(torch.equal(value, weights[name]) for name, value in model.weights().items())
    model.save(tmp_path / "export")
    exported = Decoder.load(tmp_path / "export")
    assert all(torch.equal(value, weights[name]) for name, value in exported.weights().items())


@pytest.mark.slow
def test_one_flipped_bit_is_found_wherever_it_is(folder, tmp_path):
    """200 of 200: in any file, at any place."""
    target = Path(shutil.copytree(newest(folder / "four"), tmp_path / "step-00000006"))
    files = sorted(target.iterdir())
    choose = random.Random(0)
    assert checkpoint.damage(target) is None
    for trial in range(200):
        file = files[trial % len(files)]
        content = bytearray(file.read_bytes())
        place, bit = choose.randrange(len(content)), choose.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        assert checkpoint.damage(target) is not None, f"bit {bit} of byte {place} of {file.name}"
        content[place] ^= 1 << bit
        file.write_bytes(content)
    assert checkpoint.damage(target) is None


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.slow
def test_planted_pickles_never_run(folder, tmp_path):
    """In place of each file, with a manifest that vouches for it, and beside them under the names others use."""
    refused = (UserError, SafetensorError)  # the latter of a file that is vouched for and is none
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    for victim in sorted(path.name for path in newest(folder / "four").iterdir()):
        target = Path(
            shutil.copytree(
                newest(folder / "four"), tmp_path / victim / "checkpoints" / "step-00000006"
            )
        )
        (target / victim).write_bytes(payload)
        for name in (".metadata", "pytorch_model.bin", "optimizer.pt", "__0_0.distcp"):
            (target / name).write_bytes(payload)
        if victim != checkpoint.MANIFEST:
            manifest = json.loads((target / checkpoint.MANIFEST).read_text())
            hashes = {**manifest["sha256"], victim: hashlib.sha256(payload).hexdigest()}
            (target / checkpoint.MANIFEST).write_bytes(
                checkpoint.seal({"step": 6, "sha256": hashes})
            )
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(folder / "four" / name, tmp_path / victim)
        unread = victim.startswith("optimizer")  # loading a model alone does not open it
        with nullcontext() if unread else pytest.raises(refused):
            checkpoint.load_model(tmp_path / victim)
        # A run has its own
        with nullcontext() if victim == "config.json" else pytest.raises(refused):
            train(config_of(folder), tmp_path / victim, resume=True)
    assert not mark.exists()
    pickle.loads(payload)  # the payload would have left its mark
    assert mark.exists()


def fill_disk_on_one_rank(config: Config, folder: Path, async_save: bool) -> None:
    """Rank 1 fails in its third save, at the fifth file it writes: every rank stops with the same message, and the last
    checkpoint stays."""
    real, calls = shards.write_file, []

    def write_file(path: Path, content) -> str:
        calls.append(path)
        if os.environ["RANK"] == "1" and len(calls) == 5:
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    shards.write_file = write_file
    config = replace(config, train=replace(config.train, async_save=async_save))
    with pytest.raises(
        UserError, match=r"could not write .*00000003: No space left.*good .*00000002"
    ):
        train(config, folder / "full")


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_full_disk_on_one_rank_stops_all_and_keeps_the_last_good_one(tmp_path, async_save):
    spawn(2, fill_disk_on_one_rank, settings(tmp_path), tmp_path, async_save)
    saved = checkpoint.checkpoints(tmp_path / "full" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000001", "step-00000002"]
    assert all(checkpoint.damage(path) is None for path in saved)
    assert not list((tmp_path / "full" / "checkpoints").glob(".tmp-*"))


def run_until_full(config: Config, out: Path) -> None:
    with pytest.raises(
        UserError, match=r"could not write .*No space left on device.*The last good checkpoint is"
    ):
        train(config, out)


@pytest.mark.slow
def test_a_disk_that_is_really_full_under_two_ranks(tmp_path, small_disk):
    config = settings(tmp_path)
    config = replace(config, train=replace(config.train, steps=100, keep=99, async_save=True))
    spawn(2, run_until_full, config, small_disk / "run")
    saved = checkpoint.checkpoints(small_disk / "run" / "checkpoints")
    assert saved
    assert all(checkpoint.damage(path) is None for path in saved)
    assert not list((small_disk / "run" / "checkpoints").glob(".tmp-*"))
