"""Checkpoints of several ranks: read under any other layout, whole or absent, and nothing in them is ever run."""

import hashlib
import os
import pickle
import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disturbed import each_file, no_space
from ranks import spawn
from safetensors import SafetensorError
from tinyrun import changed, checkpoint_of, fingerprint, go_back, read_all, saved_steps, tiny
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from headwater.cli import main
from headwater.errors import UserError
from headwater.runs.files import read_json
from headwater.runs.settings import Config, ParallelSettings, load_file
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.checkpoint import storage as shards
from headwater.train.distributed.ranks import join
from headwater.train.loop import train
from headwater.train.run import begin, save, with_vocabulary

STEPS = 6


def settings(folder: Path, **parallel) -> Config:
    """Muon for the matrices, AdamW for the rest: both optimizers are in every checkpoint."""
    sizes = {"batch_size": 8, "accumulate": 2, "steps": STEPS, "save_every": 1, "keep": 9}
    # Two ranks can divide two heads.
    options = {"kv_heads": 2, "eval_every": 3, "hang_timeout": 60, **parallel}
    return tiny(folder, optimizer="muon", **sizes, **options)


def run_and_resume(config: Config, folder: Path) -> None:
    """A whole run, and copies of it that lost everything after each of their steps and went on. Every other one of them
    saves in the background."""
    ranks = join(config.parallel, torch.device("cpu"))  # once for all runs
    train(config, folder / "whole")
    for step in range(1, STEPS):
        out = folder / f"from-{step}"
        if ranks.main:
            shutil.copytree(folder / "whole", out)
            go_back(out, step)
        ranks.barrier()
        train(changed(config, async_save=step % 2 == 0), out, resume=True)


def reshard(config: Config, source: Path, target: Path) -> None:
    """Load what another layout saved, and save it again."""
    ranks = join(config.parallel, torch.device("cpu"))
    run = begin(config, source, resume=True, ranks=ranks)
    run.saver.root = target / "checkpoints"
    save(run)
    run.log.close()


PLACEMENTS: dict[str, tuple[list[Placement], list[Placement]]] = {
    # Over a grid of two by two, and over two ranks
    "columns": ([Replicate(), Shard(1)], [Shard(0)]),
    "rows-and-columns": ([Shard(0), Shard(1)], [Shard(1)]),
    # More ranks than rows: one of them has none
    "rows-twice": ([Shard(0), Shard(0)], [Replicate()]),
    "copies": ([Replicate(), Replicate()], [Shard(1)]),
}


def whole_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"model/{name}": torch.arange(35.0).view(7, 5) for name in PLACEMENTS}
    tensors["model/rows-twice"] = torch.arange(15.0).view(3, 5)
    return tensors


def divide(grid: DeviceMesh, which: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, value in whole_tensors().items():
        placements = PLACEMENTS[name.removeprefix("model/")][which]
        tensors[name] = distribute_tensor(value, grid, placements)
    return tensors


def save_on_four(config: Config, folder: Path) -> None:
    ranks = join(config.parallel, torch.device("cpu"))
    train(config, folder / "four")
    if ranks.main:
        shutil.copytree(folder / "four", folder / "source")
    ranks.barrier()
    divided = changed(config, pipeline=1, chunks=1, tensor=2)
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
    tensors = divide(init_device_mesh("cpu", (2,)), 1)
    for value in tensors.values():
        value.to_local().zero_()
    shards.read(reader, tensors, alone=False)
    for name, value in whole_tensors().items():
        assert torch.equal(tensors[name].full_tensor(), value), name


def refuse_truncated(config: Config, folder: Path) -> None:
    """The ranks divide the files to check among them; whoever meets a short one, both refuse."""
    ranks = join(config.parallel, torch.device("cpu"))
    for position in range(2):
        target = folder / f"cut-{position}" / "step-00000006"
        if ranks.main:
            shutil.copytree(newest(folder / "four"), target)
            victim = target / list(read_json(target / "manifest.json")["sha256"])[position]
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
    entries = read_json(tensor / "index.json")["tensors"]
    # Two of rows, two of columns
    assert len(entries["model/sublayers.1.body.output.weight"]["pieces"]) == 4
    assert {path.name for path in two.glob("model*")} == {
        f"model-0000{i}.safetensors" for i in (0, 1)
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
            tensors = read_all(path, kind)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected), path
    model, _ = checkpoint.load_model(four)
    assert torch.equal(model.norm.weight, read_all(four, "model")["norm.weight"])


@pytest.mark.slow
def test_one_process_goes_on_with_what_four_began_as_the_manual_says(
    folder, tmp_path, capfd, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = Path(shutil.copytree(folder / "four", tmp_path / "run"))
    go_back(out, STEPS - 1)
    resume = ["train", "--out", str(out), "--resume"]
    assert main(resume) == 1
    assert "A run resumed by one process needs --pipeline 1 --tensor 1" in capfd.readouterr().err
    layout = "--pipeline 1 --tensor 1 --accumulate 1 --checkpoint-activations"
    assert main([*resume, *layout.split()]) == 0
    one, four = (read_json(run / "summary.json") for run in (out, folder / "four"))
    assert one["steps"] == STEPS
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)


@pytest.mark.slow
def test_any_division_of_a_tensor_is_read_by_any_other(folder):
    """Rows, columns, both and copies over a grid of four ranks: two have read them otherwise already; here one does."""
    saved = folder / "grid" / "step-00000001"
    assert checkpoint.damage(saved) is None
    index, tensors = read_json(saved / "index.json")["tensors"], read_all(saved, "model")
    pieces = {name.removeprefix("model/"): len(entry["pieces"]) for name, entry in index.items()}
    assert pieces == {"columns": 2, "rows-and-columns": 4, "rows-twice": 3, "copies": 1, "plain": 1}
    for name, value in whole_tensors().items():
        assert torch.equal(tensors[name.removeprefix("model/")], value), name


def config_of(folder: Path) -> Config:
    """The same as `settings`, but the corpus is not touched, whose times name its cache."""
    return replace(load_file(folder / "four"), parallel=ParallelSettings())


@pytest.mark.slow
def test_stop_and_resume_at_five_places(tmp_path):
    spawn(2, run_and_resume, settings(tmp_path, pipeline=2, chunks=2), tmp_path)
    whole = fingerprint(tmp_path / "whole")
    for step in range(1, STEPS):
        assert fingerprint(tmp_path / f"from-{step}") == whole


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
    """A pickle stands for each file, with a manifest that vouches for it, and under the names that others use."""
    refused = (UserError, SafetensorError)  # the latter of a file that is vouched for and is none
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    for victim in sorted(path.name for path in newest(folder / "four").iterdir()):
        out = tmp_path / victim
        target = checkpoint_of(out, STEPS)
        shutil.copytree(newest(folder / "four"), target)
        for name in (victim, ".metadata", "pytorch_model.bin", "optimizer.pt", "__0_0.distcp"):
            (target / name).write_bytes(payload)
        if victim != checkpoint.MANIFEST:
            hashes = read_json(target / checkpoint.MANIFEST)["sha256"]
            hashes[victim] = hashlib.sha256(payload).hexdigest()
            manifest = checkpoint.seal({"step": STEPS, "sha256": hashes})
            (target / checkpoint.MANIFEST).write_bytes(manifest)
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(folder / "four" / name, out)
        unread = victim.startswith("optimizer")  # loading a model alone does not open it
        with nullcontext() if unread else pytest.raises(refused):
            checkpoint.load_model(out)
        # A run has its own
        with nullcontext() if victim == "config.json" else pytest.raises(refused):
            train(config_of(folder), out, resume=True)
    assert not mark.exists()
    pickle.loads(payload)  # the payload would have left its mark
    assert mark.exists()


def fill_disk_on_one_rank(config: Config, folder: Path) -> None:
    """Rank 1 fails in its third save, at the fifth file it writes: every rank stops with the same message, and the last
    checkpoint stays."""
    files = []

    def fill_disk(path: Path) -> None:
        files.append(path)
        if os.environ["RANK"] == "1" and len(files) == 5:
            no_space(path)

    each_file(pytest.MonkeyPatch(), fill_disk)
    message = r"could not write .*00000003: No space left.*good .*00000002"
    with pytest.raises(UserError, match=message):
        train(config, folder / "full")


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_full_disk_on_one_rank_stops_all_and_keeps_the_last_good_one(tmp_path, async_save):
    config = settings(tmp_path, async_save=async_save)
    spawn(2, fill_disk_on_one_rank, config, tmp_path)
    assert saved_steps(tmp_path / "full") == [1, 2]
    for step in (1, 2):
        assert checkpoint.damage(checkpoint_of(tmp_path / "full", step)) is None
