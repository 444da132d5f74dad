"""A run begins, goes on, or is refused: what its folder holds decides."""

import shutil
from dataclasses import asdict

import pytest
import torch
from disturbed import power_cut
from tinyrun import STEPS, changed, fingerprint, go_back, tiny, write_corpus

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.runs.files import read_json
from headwater.runs.results import TrainResult, code_of
from headwater.runs.settings import load_file
from headwater.train import compare, load_run, study
from headwater.train.data.dataset import prepare
from headwater.train.loop import train
from headwater.train.run import begin, compile_mode


def test_a_finished_run_is_left_alone_and_a_taken_folder_is_refused(run_folder):
    config, summary = load_file(run_folder), TrainResult.read(run_folder)
    written = (run_folder / "summary.json").stat().st_mtime_ns
    assert train(config, run_folder, resume=True) == summary
    assert (run_folder / "summary.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="already holds a run: continue it with resume"):
        train(config, run_folder)

    # Killed between the last checkpoint and the summary
    (run_folder / "summary.json").unlink()
    assert train(config, run_folder, resume=True).loss == summary.loss


def test_a_finished_run_without_its_weights_is_not_begun_anew(run_folder):
    """A study drops them: taken further, its run would lose its result and its metrics."""
    shutil.rmtree(run_folder / "checkpoints")
    before = {path: path.read_bytes() for path in run_folder.iterdir()}
    config = load_file(run_folder)
    longer = changed(config, steps=2 * STEPS)
    for asked, resume in ((longer, True), (config, True), (longer, False)):
        with pytest.raises(UserError, match="a finished run without its weights"):
            train(asked, run_folder, resume=resume)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_is_taken_further_is_unfinished_until_it_gets_there(run_folder):
    for name in ("spike-step-12", "spike-step-13", "my-step-13"):
        (run_folder / f"{name}.json").touch()
    begin(changed(load_file(run_folder), steps=24), run_folder, resume=True).log.close()
    assert not (run_folder / "summary.json").exists()
    # A file about a bad step goes when the step is taken again.
    steps = {path.stem for path in run_folder.glob("*-step-*")}
    assert steps == {"spike-step-12", "my-step-13"}


def test_a_tilde_leads_home_from_python_too(run_folder, tmp_path, monkeypatch):
    """Else a folder of that name is made where one stands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = load_file("~/run")
    assert train(config, "~/run", resume=True).folder == run_folder
    assert load_run("~/run").config == config
    assert TrainResult.read("~/run").folder == run_folder
    with pytest.raises(UserError, match=f"no comparison at {tmp_path}/pair to resume"):
        compare(config, "~/pair", residuals=["standard"], seeds=[0], resume=True)
    with pytest.raises(UserError, match=f"cannot read the recipe {tmp_path}/recipe.toml"):
        study("~/recipe.toml")
    assert not (tmp_path / "~").exists()


def test_a_run_goes_on_where_its_text_lies_now_and_not_on_another_text(tmp_path, finished):
    """It is another machine, or another folder: the tokens are the same, to the last."""
    config, out = tiny(tmp_path, optimizer="muon", keep=2), tmp_path / "run"
    with power_cut(8):
        train(config, out)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    text = {"source": (str(tmp_path / "moved"),), "cache": str(tmp_path / "other")}
    moved = changed(config, **text)
    assert train(moved, out, resume=True).loss == TrainResult.read(finished).loss
    assert fingerprint(out)["files"] == fingerprint(finished)["files"]
    assert load_file(out).data.source == text["source"]

    (write_corpus(tmp_path) / "more.txt").write_text("a text that was not there before " * 20)
    go_back(out, 10)
    there = r"(?s)on other text:\n  data.source: .* asked for\n  corpus.source_hash"
    advice = "Name with data.source the text.*train.init_from .*step-"
    with pytest.raises(UserError, match=f"{there}.*{advice}"):
        train(config, out, resume=True)


def test_another_configuration_is_refused_with_the_keys_that_differ(run_folder):
    config = load_file(run_folder)
    with pytest.raises(UserError) as caught:
        train(changed(config, seed=5, batch_size=8), run_folder, resume=True)
    message = str(caught.value)
    assert "train.seed: 0 there, 5 asked for" in message
    assert "train.batch_size: 4 there, 8 asked for" in message
    assert "train.steps" not in message
    free = {"save_every": 7, "log_every": 3, "accumulate": 2, "compile": "model"}
    train(changed(config, checkpoint_activations=True, **free), run_folder, resume=True)


def test_summary_and_resolved_configuration(run_folder):
    saved = read_json(run_folder / "summary.json")
    assert saved.pop("hash")
    summary = TrainResult.read(run_folder)
    assert {**saved, "folder": run_folder} == asdict(summary)
    assert summary.tokens == STEPS * 4 * 32
    assert summary.peak_memory_bytes > 50 * 2**20
    assert summary.code == code_of()
    config = load_file(run_folder)
    assert summary.source_hash == prepare(config.data).identity["source_hash"]
    assert (config.model.residual, config.model.vocab_size) == ("attnres-block:block=2", 320)


def test_a_device_is_tried_out_before_any_work(tmp_path):
    """Torch knows its name, and this machine has none."""
    with pytest.raises(UserError, match="device 'mps' cannot be used here: "):
        train(tiny(tmp_path, device="mps"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


USUAL = ("standard", "attnres-block", "attnres-full", "mhc", "muddformer", "denseformer")
SLOW = ("attnres-full:weights=sigmoid", "vertical-attention", "mhc:backend=reference")


@pytest.mark.parametrize("residual", [*USUAL, *SLOW])
def test_what_is_compiled_unless_one_says(tmp_path, residual):
    """The whole model, where a residual has no kernels and the run is long enough; nothing on a CPU or among ranks."""
    shape = {"vocab_size": 8, "dim": 8, "layers": 1, "heads": 1, "kv_heads": 1}
    model = Decoder(ModelConfig(**shape, residual=residual))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    long, short = tiny(tmp_path, steps=2000), tiny(tmp_path, steps=1999)
    assert compile_mode(long, model, gpu) == ("layers" if residual in USUAL else "model")
    assert compile_mode(short, model, gpu) == "layers"
    for device in (None, cpu):
        assert compile_mode(long, model, device) == "none"
    for mode in ("none", "layers", "model"):
        assert compile_mode(changed(long, compile=mode), model, None) == mode
