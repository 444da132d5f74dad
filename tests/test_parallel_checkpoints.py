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
from tinyrun import fingerprint, tiny

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.train import checkpoint, shards
from headwater.train.config import Config, ParallelSettings, merge
from headwater.train.contents import read_all
from headwater.train.loop import train
from headwater.train.parallel import join
from headwater.train.run import begin, save

pytestmark = pytest.mark.xdist_group("parallel_checkpoints")  # one worker: its fixtures are costly

STEPS = 6


def settings(folder: Path, **parallel) -> Config:
    config = tiny(folder, batch_size=8, accumulate=2, steps=STEPS, save_every=1, keep=9, log_every=1, eval_every=3)
    return replace(config, parallel=ParallelSettings(hang_timeout=60, **parallel))


def run_and_resume(config: Config, folder: Path) -> None:
    """A whole run, and copies of it that lost everything after each of their steps and went on."""
    train(config, folder / "whole")
    for step in range(1, STEPS):
        out, main = folder / f"from-{step}", os.environ["RANK"] == "0"
        ready = folder / f"ready-{step}"
        if main:
            shutil.copytree(folder / "whole", out)
            for later in checkpoint.checkpoints(out / "checkpoints")[step:]:
                shutil.rmtree(later)
            (out / "summary.json").unlink()
            ready.touch()
        while not ready.exists():
            pass
        train(config, out, resume=True)


def reshard(config: Config, source: Path, target: Path) -> None:
    """Load what another layout saved, and save it again."""
    ranks = join(config.parallel, torch.device("cpu"))
    run = begin(config, source, resume=True, ranks=ranks)
    run.folder = target
    save(run)
    run.log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Six steps on four ranks (two stages of two chunks, each on two shards), then read by two shards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    spawn(4, train, settings(folder, pipeline=2, chunks=2), folder / "four")
    shutil.copytree(folder / "four", folder / "source")
    spawn(2, reshard, settings(folder), folder / "source", folder / "two")
    return folder


def newest(run: Path) -> Path:
    return checkpoint.checkpoints(run / "checkpoints")[-1]


@pytest.mark.slow
def test_four_ranks_to_two_to_one(folder, tmp_path):
    four, two = newest(folder / "four"), newest(folder / "two")
    assert {path.name for path in two.glob("model*")} == {"model-00000.safetensors", "model-00001.safetensors"}
    shutil.copytree(folder / "four", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(two, tmp_path / "one" / "checkpoints" / two.name)
    run = begin(config_of(folder), tmp_path / "one", resume=True)
    one = save(run)
    assert (one / "model.safetensors").exists()
    for kind in ("model", "optimizer"):
        values = [read_all(path, kind) for path in (four, two, one)]
        assert values[0].keys() == values[1].keys() == values[2].keys()
        for name, value in values[0].items():
            assert torch.equal(value, values[1][name]), name
            assert torch.equal(value, values[2][name]), name


def config_of(folder: Path) -> Config:
    """As `settings`, without touching the corpus, whose times name its cache."""
    saved = json.loads((folder / "four" / "config.json").read_text())
    return merge(Config(), {**saved, "parallel": {}}, "test")


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
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    for victim in sorted(path.name for path in newest(folder / "four").iterdir()):
        target = Path(shutil.copytree(newest(folder / "four"), tmp_path / victim / "checkpoints" / "step-00000006"))
        (target / victim).write_bytes(payload)
        for name in (".metadata", "pytorch_model.bin", "optimizer.pt", "__0_0.distcp"):
            (target / name).write_bytes(payload)
        if victim != checkpoint.MANIFEST:
            manifest = json.loads((target / checkpoint.MANIFEST).read_text())
            hashes = {**manifest["sha256"], victim: hashlib.sha256(payload).hexdigest()}
            (target / checkpoint.MANIFEST).write_bytes(checkpoint._seal({"step": 6, "sha256": hashes}))
        shutil.copy(folder / "four" / "tokenizer.json", tmp_path / victim)
        unread = victim.startswith(("optimizer", "state"))  # loading a model alone does not open these
        with nullcontext() if unread else pytest.raises((UserError, ValueError)):
            checkpoint.load_model(tmp_path / victim)
        with nullcontext() if victim == "config.json" else pytest.raises((UserError, ValueError)):  # a run has its own
            train(config_of(folder), tmp_path / victim, resume=True)
    assert not mark.exists()
    pickle.loads(payload)  # the payload would have left its mark
    assert mark.exists()


def fill_disk_on_one_rank(config: Config, folder: Path) -> None:
    """The third write of rank 1 fails: every rank stops with the same message, and the last checkpoint stays."""
    real, calls = shards.write_file, []

    def write_file(path: Path, content) -> str:
        calls.append(path)
        if os.environ["RANK"] == "1" and len(calls) == 5:
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    shards.write_file = write_file
    with pytest.raises(UserError, match=r"could not write .*00000003: No space left.*good .*00000002"):
        train(config, folder / "full")


@pytest.mark.slow
def test_a_full_disk_on_one_rank_stops_all_and_keeps_the_last_good_one(tmp_path):
    spawn(2, fill_disk_on_one_rank, settings(tmp_path), tmp_path)
    saved = checkpoint.checkpoints(tmp_path / "full" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000001", "step-00000002"]
    assert all(checkpoint.damage(path) is None for path in saved)
    assert not list((tmp_path / "full" / "checkpoints").glob(".tmp-*"))
