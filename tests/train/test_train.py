"""Training: resuming is bitwise, the numbers in the log are right, and parameters meet the optimizer they should."""

import functools
import gc
import itertools
import json
import math
import shutil
import threading
import time
import weakref
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinyrun import STEPS, fingerprint, read_all, tiny, write_corpus

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import names, pinned
from headwater.residuals import record as record_of
from headwater.runs.record import read_run
from headwater.runs.results import TrainResult, code_of
from headwater.runs.settings import DataSettings, OptimSettings, TrainSettings
from headwater.runs.settings import load_file as read_settings
from headwater.train import compare, load, loop, study
from headwater.train.checkpoint import storage as shards
from headwater.train.checkpoint.folder import checkpoints, damage, load_model, read_state
from headwater.train.checkpoint.saver import HostBuffers
from headwater.train.data.dataset import prepare
from headwater.train.data.tokenizer import ByteTokenizer
from headwater.train.distributed.fsdp import clip
from headwater.train.distributed.parts import local
from headwater.train.files import read_json
from headwater.train.load import LoadedRun, fill_from, load_run
from headwater.train.loop import accumulate, evaluate, train, update, windows_of
from headwater.train.monitor.bad_steps import Skips
from headwater.train.optim import build_optimizers, learning_rate, set_learning_rate
from headwater.train.run import begin, compile_mode, save


class PowerCut(BaseException):
    """Ends a run in the middle of a step, as no handler expects."""


def cut_power(monkeypatch, at_step: int) -> None:
    real = loop.log_update

    def log_update(run, *values):
        real(run, *values)
        if run.step == at_step:
            raise PowerCut

    monkeypatch.setattr(loop, "log_update", log_update)


def cut_off(config, out: Path, monkeypatch, at_step: int) -> None:
    """Leave a run as a power cut does."""
    with monkeypatch.context() as patch:
        cut_power(patch, at_step)
        with pytest.raises(PowerCut):
            train(config, out)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a tiny run, beside its text."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny(folder), folder / "run")
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def more_steps(folder: Path, steps: int):
    """The settings of a run, but for its length."""
    config = read_settings(folder)
    return replace(config, train=replace(config.train, steps=steps))


RESUMED = [
    ("standard", "adamw", {"accumulate": 2, "checkpoint_activations": True}),
    ("attnres-block:block=2", "muon", {}),
    ("attnres-full", "muon", {"async_save": True, "save_every": 2}),
]


@pytest.mark.parametrize(("residual", "optimizer", "options"), RESUMED)
def test_resume_is_bitwise(tmp_path, monkeypatch, residual, optimizer, options):
    config = tiny(tmp_path, residual=residual, optimizer=optimizer, **options)
    summary = train(config, tmp_path / "whole")
    assert summary.steps == STEPS
    for cut in (3, 8):  # before the first checkpoint, and after it
        out = tmp_path / f"cut{cut}"
        cut_off(config, out, monkeypatch, at_step=cut)
        assert not (out / "summary.json").exists()
        again = train(config, out, resume=True)
        assert fingerprint(out) == fingerprint(tmp_path / "whole")
        assert (again.loss, again.tokens) == (summary.loss, summary.tokens)


@pytest.mark.parametrize("residual", names())
def test_every_residual_trains_logs_and_resumes(tmp_path, residual):
    config, out = (
        tiny(tmp_path, residual=residual, steps=2, depth_every=2, save_every=1),
        tmp_path / "run",
    )
    train(config, out)
    whole = fingerprint(out)
    assert {"train", "eval", "depth"} == {record["kind"] for record in whole["metrics"]}
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    (out / "summary.json").unlink()
    train(config, out, resume=True)
    assert fingerprint(out) == whole
    model, _ = load_model(out)
    # Options that follow from the network are written out
    assert model.config.residual == pinned(model.residual)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_resume_is_bitwise_on_a_gpu(tmp_path, monkeypatch, async_save):
    """In bf16 and with deterministic kernels; steps beyond the cut repeat those of the undisturbed run."""
    config = tiny(tmp_path, device="cuda", async_save=async_save)
    train(config, tmp_path / "whole")
    cut_off(config, tmp_path / "cut", monkeypatch, at_step=8)
    train(config, tmp_path / "cut", resume=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_finished_run_is_left_alone_and_a_taken_folder_is_refused(run_folder):
    config, summary = read_settings(run_folder), TrainResult.read(run_folder)
    before = (run_folder / "summary.json").stat().st_mtime_ns
    assert train(config, run_folder, resume=True) == summary
    assert (run_folder / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="already holds a run: continue it with resume"):
        train(config, run_folder)

    # Killed between the last checkpoint and the summary
    (run_folder / "summary.json").unlink()
    assert train(config, run_folder, resume=True).loss == summary.loss


def test_a_run_that_ends_in_its_warm_up_says_so(tmp_path, capsys):
    said = "at 25 % of its learning rate: raise train.steps or lower optim.warmup"
    for steps, warmup, shown in ((2, 8, True), (2, 2, False)):
        config = tiny(tmp_path, steps=steps)
        train(replace(config, optim=replace(config.optim, warmup=warmup)), tmp_path / str(warmup))
        assert (said in capsys.readouterr().out) == shown


def test_a_finished_run_without_its_weights_is_not_begun_anew(run_folder):
    """A study drops them: taken further, its run would lose its result and its metrics."""
    shutil.rmtree(run_folder / "checkpoints")
    before = {path: path.read_bytes() for path in run_folder.iterdir()}
    longer = more_steps(run_folder, 2 * STEPS)
    for config, resume in ((longer, True), (more_steps(run_folder, STEPS), True), (longer, False)):
        with pytest.raises(UserError, match="a finished run without its weights"):
            train(config, run_folder, resume=resume)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_anew(run_folder, capsys):
    config = read_settings(run_folder)
    (run_folder / "summary.json").unlink()
    shutil.rmtree(run_folder / "checkpoints")
    train(config, run_folder, resume=True)
    message = "to go on from (one is written every 5 steps): the run begins anew\n"
    assert f"no checkpoint in {run_folder / 'checkpoints'} {message}" in capsys.readouterr().out


def test_a_run_is_taken_further_than_planned_and_says_so(tmp_path, capsys):
    """With wsd the rate is the plain one until the decay: a run that has not decayed yet goes on bitwise as if it had
    been planned so."""
    config = tiny(tmp_path)
    config = replace(config, optim=replace(config.optim, schedule="wsd", decay=0.0))
    longer = replace(config, train=replace(config.train, steps=24))
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    train(longer, whole)
    assert train(config, grown).steps == 12
    capsys.readouterr()
    assert train(longer, grown, resume=True).steps == 24
    assert (
        "goes to 24 steps, where 12 were planned: from step 12 on the learning rate is now"
        in capsys.readouterr().out
    )
    found, expected = fingerprint(grown), fingerprint(whole)
    assert found["files"] == expected["files"]
    assert json.loads((grown / "config.json").read_text())["train"]["steps"] == 24
    extended = [record for record in found["metrics"] if record["kind"] == "extend"]
    assert [(record["step"], record["planned"], record["steps"]) for record in extended] == [
        (12, 12, 24)
    ]
    assert "planned for 12 steps, and for 24 from step 12 on" in " ".join(read_run(grown).notes)
    assert train(longer, grown, resume=True).steps == 24
    assert fingerprint(grown) == found
    with pytest.raises(UserError, match=r"train.steps must be at least 24"):
        train(config, grown, resume=True)


def test_a_run_that_is_taken_further_is_unfinished_until_it_gets_there(run_folder):
    for step in (12, 13):
        (run_folder / f"spike-step-{step}.json").touch()
    (run_folder / "my-step-13.json").touch()
    begin(more_steps(run_folder, 24), run_folder, resume=True).log.close()
    assert not (run_folder / "summary.json").exists()
    # What was known of a bad step goes when the step is taken again.
    steps = {path.name for path in run_folder.glob("*-step-*")}
    assert steps == {"spike-step-12.json", "my-step-13.json"}


def test_a_run_begins_with_the_weights_of_another(tmp_path):
    config, first = tiny(tmp_path, residual="attnres-full"), tmp_path / "first"
    train(config, first)
    trained = dict(load_run(first).model.named_parameters())
    for name in ("attnres-full", "standard"):
        begun = replace(
            config,
            model=replace(config.model, residual=name),
            train=replace(config.train, init_from=str(first)),
        )
        model = begin(begun, tmp_path / name, resume=False).whole
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, trained[key]), key
        assert name == "standard" or any("residual." in key for key, _ in model.named_parameters())
    other = replace(begun, model=replace(begun.model, residual="attnres-block"))
    fresh = begin(replace(other, train=config.train), tmp_path / "fresh", resume=False).whole
    model = begin(other, tmp_path / "block", resume=False).whole
    for key, parameter in model.named_parameters():
        expected = (
            dict(fresh.named_parameters())[key] if key.startswith("residual.") else trained[key]
        )
        assert torch.equal(parameter, expected), key
    with pytest.raises(UserError, match="weights do not fit the model"):
        begin(replace(begun, model=replace(begun.model, layers=3)), tmp_path / "deep", resume=False)
    with pytest.raises(UserError, match=r"no checkpoint in .*absent"):
        begin(
            replace(begun, train=replace(begun.train, init_from=str(tmp_path / "absent"))),
            tmp_path / "x",
            resume=False,
        )
    letters = replace(begun, data=replace(begun.data, tokenizer="bpe", bpe_vocab=300))
    with pytest.raises(UserError, match="was trained with another tokenizer"):
        begin(letters, tmp_path / "letters", resume=False)


WIDTHS = {"dim": 16, "heads": 2, "kv_heads": 2, "mlp_dim": 32, "kda_heads": 2, "kda_head_dim": 8}
OTHER = {  # of every setting of a model another value: those of a shape, and those that no shape shows
    "vocab_size": 64, "dim": 32, "layers": 6, "mlp_dim": 48, "residual": "highway", "value_residual": True,
    "qk_norm": True, "kda_heads": 4, "kda_head_dim": 4, "kda_conv": 3, "mla_latent": 8, "mla_head_dim": 4,
    "mla_shared_dim": 2, "mla_value_dim": 4, "experts": 8, "expert_dim": 4, "shared_experts": 2, "dense_layers": 2,
    "context": 32, "fp32_stream": True, "depth_start": False, "router_rate": 0.1, "tie_embeddings": True,
    "pattern": "kda:attention:shortswa", "heads": 4, "kv_heads": 1, "shortswa": 3, "rope_theta": 500.0,
    "norm_eps": 0.1, "kda_gate": "bounded", "kda_norm_eps": 0.1, "experts_per_token": 1, "expert_scale": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(ModelConfig)])
def test_weights_that_fit_and_would_compute_something_else_are_refused(name, monkeypatch):
    """Whatever a new setting changes: what is loaded computes the same, or is not loaded."""
    base = WIDTHS | {"layers": 3, "pattern": "kda:shortswa:attention", "shortswa": 2}
    base |= {"experts": 4, "expert_dim": 8, "context": 16}
    base |= {"mla_head_dim": 8, "mla_value_dim": 8, "mla_shared_dim": 4, "mla_latent": 16}
    if name.startswith("mla"):
        base["pattern"] = "mla"
    there = Decoder(ModelConfig(vocab_size=32, **base)).eval()
    for parameter in there.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # Alone it would show in the shapes of keys
    with_it = {"kv_heads": OTHER["heads"]} if name == "heads" else {}
    here = Decoder(ModelConfig(**{"vocab_size": 32, **base, name: OTHER[name], **with_it})).eval()
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(load, "load_run", lambda folder: LoadedRun(there, tokenizer, None))
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    refused = ""
    try:
        fill_from(here, tokenizer, "there")
    except UserError as error:
        refused = str(error)
    if not refused:
        torch.testing.assert_close(here(tokens), there(tokens))
    else:
        assert "weights do not fit the model" in refused or f"model.{name} = " in refused


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"pattern": "attention:attention"}),
        ({"pattern": "kda*2", "rope_theta": 500.0}, {"pattern": "kda:kda"}),
        (
            {},
            {
                "kda_gate": "bounded",
                "kda_norm_eps": 0.1,
                "experts_per_token": 1,
                "expert_scale": 3.0,
            },
        ),
    ],
)
def test_weights_begin_a_model_whose_settings_differ_in_nothing_that_it_has(
    there, here, monkeypatch
):
    settings = {"vocab_size": 32, "layers": 2, **WIDTHS}
    made = [Decoder(ModelConfig(**settings | more)).eval() for more in (there, here)]
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(load, "load_run", lambda folder: LoadedRun(made[0], tokenizer, None))
    fill_from(made[1], tokenizer, "there")
    tokens = torch.randint(32, (2, 8))
    torch.testing.assert_close(made[1](tokens), made[0](tokens))


def test_a_tilde_leads_home_from_python_too(run_folder, tmp_path, monkeypatch):
    """Else a folder of that name is made where one stands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = read_settings("~/run")
    assert train(config, "~/run", resume=True).folder == run_folder
    assert load_run("~/run").config == config
    assert TrainResult.read("~/run").folder == run_folder
    with pytest.raises(UserError, match=f"no comparison at {tmp_path}/pair to resume"):
        compare(config, "~/pair", residuals=["standard"], seeds=[0], resume=True)
    with pytest.raises(UserError, match=f"cannot read the recipe {tmp_path}/recipe.toml"):
        study("~/recipe.toml")
    assert not (tmp_path / "~").exists()


def test_a_longer_context_may_bring_another_rope_base(monkeypatch):
    def decoder(**other):
        return Decoder(
            ModelConfig(
                **{"vocab_size": 32, "layers": 1, "dim": 16, "heads": 2, "context": 16} | other
            )
        )

    there, tokenizer = decoder(), ByteTokenizer()
    monkeypatch.setattr(load, "load_run", lambda folder: LoadedRun(there, tokenizer, None))
    longer = decoder(context=32, rope_theta=5e5)
    fill_from(longer, tokenizer, "there")
    torch.testing.assert_close(longer.weights(), there.weights(), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"model\.norm_eps"):
        fill_from(decoder(context=32, norm_eps=0.1), tokenizer, "there")
    with pytest.raises(UserError, match=r"model\.rope_theta"):
        fill_from(decoder(context=8, rope_theta=5e5), tokenizer, "there")


def test_a_run_with_the_tokenizer_of_another_begins_with_its_weights(tmp_path):
    """On another text, of which a BPE of its own would be another; and it goes on when the other run is gone."""
    config, first, second = tiny(tmp_path), tmp_path / "first", tmp_path / "second"
    config = replace(config, data=replace(config.data, tokenizer="bpe", bpe_vocab=300))
    train(config, first)
    (tmp_path / "other.txt").write_text("".join(f"other words {i}\n" for i in range(2000)))
    text = {"source": (str(tmp_path / "other.txt"),), "cache": str(tmp_path / "cache")}
    own = DataSettings(**text, tokenizer="bpe", bpe_vocab=300)
    onward = replace(config, data=own, train=replace(config.train, init_from=str(first)))
    with pytest.raises(UserError, match=rf"another tokenizer \(.* with data.tokenizer = .*{first}"):
        begin(onward, second, resume=False)
    train(replace(onward, data=DataSettings(**text, tokenizer=str(first))), second)
    assert load_run(second).tokenizer.to_json() == load_run(first).tokenizer.to_json()
    shutil.rmtree(first)
    again = read_settings(second)
    longer = replace(again, train=replace(again.train, steps=again.train.steps + 2))
    assert train(longer, second, resume=True).steps == config.train.steps + 2
    assert read_settings(second).data == again.data
    with pytest.raises(UserError, match=rf"no tokenizer at {first}"):
        train(replace(again, train=config.train), tmp_path / "third")
    third = replace(again, data=replace(again.data, tokenizer=str(second)), train=config.train)
    assert begin(third, tmp_path / "third", resume=False).identity["corpus"]["tokenizer_hash"]


def test_training_learns(tmp_path):
    config = tiny(tmp_path, steps=60, eval_every=20, log_every=60, depth_every=60, save_every=60)
    train(replace(config, optim=replace(config.optim, lr=0.02, query_lr=1.0)), tmp_path / "run")
    evals = [
        r["bits_per_byte"] for r in fingerprint(tmp_path / "run")["metrics"] if r["kind"] == "eval"
    ]
    assert len(evals) == 3
    assert evals[-1] < 0.7 * evals[0]
    assert (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("change", [{"accumulate": 4}, {"checkpoint_activations": True}])
def test_what_saves_memory_does_not_change_the_result(tmp_path, change):
    runs = ("plain", "other")
    plain = train(tiny(tmp_path), tmp_path / "plain")
    other = train(tiny(tmp_path, **change), tmp_path / "other")
    assert other.loss == pytest.approx(plain.loss, rel=1e-4)
    # Clipping and AdamW would hide a factor on all gradients; the log shows it.
    for key in ("loss", "grad_norm"):
        one, two = (
            [r[key] for r in fingerprint(tmp_path / name)["metrics"] if r["kind"] == "train"]
            for name in runs
        )
        assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize("size", [0.25, 40.0])
def test_clipping_lowers_what_is_too_large_and_nothing_else(size):
    """As torch does; a norm below the limit stays."""
    torch.manual_seed(0)
    layer, expected = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for parameter, other in zip(layer.parameters(), expected.parameters()):
        parameter.grad = size * torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.5).item()
    clip(layer, norm, 1.5)
    for parameter, other in zip(layer.parameters(), expected.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert (norm < 1.5) == (size < 1)


def test_every_update_has_the_rate_of_its_number_and_is_clipped_at_the_limit(tmp_path, monkeypatch):
    limits, real = [], loop.clip
    monkeypatch.setattr(
        loop, "clip", lambda model, norm, limit: (limits.append(limit), real(model, norm, limit))
    )
    config = tiny(tmp_path)
    config = replace(config, optim=replace(config.optim, clip=0.25))
    train(config, tmp_path / "run")
    rates = [r["lr"] for r in fingerprint(tmp_path / "run")["metrics"] if r["kind"] == "train"]
    assert rates == [learning_rate(number, STEPS, config.optim) for number in range(STEPS)]
    assert limits == [0.25] * STEPS


def test_speed_is_of_the_steps_since_the_clock_was_wound(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    run = SimpleNamespace(step=6, tokens_at=lambda step: 10 * step)
    clock = loop.Clock(run)
    now[0] += 4
    assert clock.tokens_per_second(8) == 2 * 10 / 4
    clock.rewind(8)
    now[0] += 5
    assert clock.tokens_per_second(9) == 10 / 5


def test_wall_clock_and_memory_go_on_where_a_run_is_resumed(tmp_path):
    config, out = tiny(tmp_path, steps=2, save_every=1), tmp_path / "run"
    train(config, out)
    (out / "summary.json").unlink()
    last = read_state(checkpoints(out / "checkpoints")[-1])
    assert last["seconds"] > 0
    run = begin(config, out, resume=True)
    assert (run.seconds, run.peak_memory, run.step) == (last["seconds"], last["peak_memory"], 2)
    assert run.elapsed() >= run.seconds
    assert run.evaluation == last["evaluation"] != {}
    run.seconds += 5000
    loop.log_update(run, loop.Outcome(2, 1.0, 1.0, 0.1), 1.0)
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] > 5000
    run.began -= 1000
    save(run)
    run.log.close()
    assert read_state(checkpoints(out / "checkpoints")[-1])["seconds"] >= last["seconds"] + 1000
    assert train(config, out, resume=True).seconds >= last["seconds"] + 1000


def test_compiled_training_gives_the_same_losses(tmp_path, monkeypatch):
    """Traced by the compiler's front end and run by the eager backend, which needs no C++ compiler."""
    plain = train(tiny(tmp_path, steps=4), tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = train(tiny(tmp_path, steps=4, compile="model"), tmp_path / "compiled")
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4)


def test_what_is_compiled_unless_one_says(tmp_path):
    """The whole model, where a residual has no kernels and the run is long enough; nothing on a CPU or among ranks."""
    gpu, settings = torch.device("cuda"), TrainSettings(steps=2000)
    shape = {"vocab_size": 8, "dim": 8, "layers": 1, "heads": 1, "kv_heads": 1}
    for fused, specs in {
        True: ("standard", "attnres-block", "attnres-full", "mhc", "muddformer", "denseformer"),
        False: ("attnres-full:weights=sigmoid", "vertical-attention", "mhc:backend=reference"),
    }.items():
        for spec in specs:
            model = Decoder(ModelConfig(**shape, residual=spec))
            config = replace(tiny(tmp_path), train=settings)
            assert compile_mode(config, model, gpu) == ("layers" if fused else "model"), spec
            short = replace(config, train=replace(settings, steps=1999))
            assert compile_mode(short, model, gpu) == "layers"
            for device in (None, torch.device("cpu")):
                assert compile_mode(config, model, device) == "none"
            for mode in ("none", "layers", "model"):
                asking = replace(config, train=replace(settings, compile=mode))
                assert compile_mode(asking, model, None) == mode


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path, tokenizer):
    """With every logit zero each token costs log2(vocab) bits, however many bytes it stands for."""
    config = tiny(tmp_path)
    config = replace(config, data=replace(config.data, tokenizer=tokenizer, bpe_vocab=300))
    run = begin(config, tmp_path / "run", resume=False)
    with torch.no_grad():
        run.model.head.weight.zero_()
    bits = evaluate(run)
    windows = run.validation.take(run.validation.spread(8))[:, 1:]
    num_bytes = len(prepare(config.data).tokenizer.decode(windows.flatten()).encode())
    assert bits == pytest.approx(
        math.log2(run.model.config.vocab_size) * windows.size / num_bytes, rel=1e-5
    )
    assert run.evaluation["loss"] == pytest.approx(math.log(run.model.config.vocab_size), rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing_bad(tmp_path, monkeypatch):
    real = loop.token_losses
    calls = {"training": 0}

    def token_losses(run, forward, windows):
        calls["training"] += torch.is_grad_enabled()
        return real(run, forward, windows) * (math.nan if calls["training"] > 7 else 1.0)

    monkeypatch.setattr(loop, "token_losses", token_losses)
    with pytest.raises(
        UserError,
        match=r"not finite at step 8 .*last good checkpoint is .*step-00000005.*lower optim.lr",
    ):
        train(tiny(tmp_path), tmp_path / "run")
    saved = checkpoints(tmp_path / "run" / "checkpoints")
    assert [folder.name for folder in saved] == ["step-00000005"]
    assert damage(saved[0]) is None
    model = Decoder.load(saved[0])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_run_that_one_bad_batch_has_stopped_goes_on_as_its_message_says(tmp_path, monkeypatch):
    spikes(monkeypatch, 8, factor=math.nan)
    with pytest.raises(
        UserError,
        match=r"loss or gradient is not finite at step 8 .*resume and train.skip_nonfinite = 1",
    ):
        train(tiny(tmp_path), tmp_path / "run")
    assert "not finite at step 8" in (tmp_path / "run" / "diverged.json").read_text()
    assert train(tiny(tmp_path, skip_nonfinite=1), tmp_path / "run", resume=True).skipped_steps == 1
    assert not (tmp_path / "run" / "diverged.json").exists()

    config = tiny(tmp_path, skip_spikes=1, spike_window=4)
    spikes(monkeypatch, 7, 8)
    with pytest.raises(UserError, match=r"above .* at step 8 .*resume and train.skip_spikes = 2"):
        train(config, tmp_path / "spikes")
    more = replace(config.train, skip_spikes=2, spike_sigmas=5.0)
    assert train(replace(config, train=more), tmp_path / "spikes", resume=True).skipped_steps == 2


def test_the_hash_of_the_code_is_of_its_python_files(tmp_path):
    """Runs of one release may be by two versions of its files."""
    (tmp_path / "part").mkdir(parents=True)
    hashes = []
    for name, text in (("a.py", "1"), ("part/b.py", "2"), ("part/b.py", "3"), ("notes.txt", "4")):
        (tmp_path / name).write_text(text)
        code_of.cache_clear()
        hashes.append(code_of(tmp_path))
    code_of.cache_clear()
    assert len({*hashes[:3]}) == 3
    assert hashes[3] == hashes[2]


@pytest.mark.parametrize("loss", [9.01, 0.0])
def test_a_run_that_no_longer_learns_stops_unless_it_has_learned_all_there_is(
    loss, tmp_path, monkeypatch
):
    """As where the stream has overflowed: a norm then makes zeros of it, and the loss is that of a guess."""
    real = loop.accumulate

    def accumulate(run, number):
        found = real(run, number)
        if number < 8:
            return found
        for parameter in run.model.parameters():
            parameter.grad.zero_()
        return loss

    monkeypatch.setattr(loop, "accumulate", accumulate)
    if not loss:
        assert train(tiny(tmp_path), tmp_path / "run").steps == STEPS
        return
    with pytest.raises(
        UserError, match=r"the gradient is zero at step 8 \(loss 9\.0100\).*lower optim.lr"
    ):
        train(tiny(tmp_path, log_every=4), tmp_path / "run")
    assert "gradient is zero" in (tmp_path / "run" / "diverged.json").read_text()


def test_each_kind_of_bad_step_has_its_own_count():
    settings = TrainSettings(skip_nonfinite=2, skip_spikes=2, spike_window=2)
    # After equal losses a small rise is no spike.
    threshold = Skips(losses=[2.0] * 2).judge(2.1, 1.0, settings).threshold
    assert threshold == pytest.approx(2.0 + 6 * 0.002)
    skips = Skips(losses=[1.0, 1.1])
    steps = (
        (99.0, 1.0, "spike", 1),
        (99.0, 1.0, "spike", 2),
        (math.nan, 1.0, "nonfinite", 1),
        (1.0, math.inf, "nonfinite", 2),
        (99.0, 1.0, "spike", 1),
        (1.0, 1.0, None, 0),
    )
    for loss, norm, kind, count in steps:
        reason = skips.judge(loss, norm, settings)
        assert (reason and reason.kind, skips.in_a_row) == (kind, count)
    assert skips.total == 5


def spikes(monkeypatch, *numbers: int, factor: float = 100, real=loop.accumulate) -> None:
    """Steps whose loss and gradient come out a hundred times too large."""

    def accumulate(run, number):
        loss = real(run, number)
        if number not in numbers:
            return loss
        for parameter in run.model.parameters():
            parameter.grad *= factor
        return loss * factor

    monkeypatch.setattr(loop, "accumulate", accumulate)


def weights_after_updates(monkeypatch) -> dict[int, torch.Tensor]:
    """All weights in a row after each step, by its number."""
    weights, real = {}, loop.update

    def update(run, number, loss):
        result = real(run, number, loss)
        weights[number] = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
        return result

    monkeypatch.setattr(loop, "update", update)
    return weights


@pytest.mark.parametrize("place", ["weights", "optimizer"])
def test_what_is_not_finite_is_never_saved(tmp_path, monkeypatch, place):
    """A number that has gone bad in memory, which neither loss nor gradient shows."""
    real = loop.update

    def update(run, number, loss):
        result = real(run, number, loss)
        if number == 7:
            parameter = run.whole.embedding.weight
            state = run.optimizers["adamw"].state[parameter]
            bad = parameter if place == "weights" else state["exp_avg"]
            with torch.no_grad():
                bad[-1, 0] = math.inf  # of a token that the text does not have
        return result

    monkeypatch.setattr(loop, "update", update)
    config = tiny(tmp_path, save_every=1, keep=2, eval_every=99)
    config = replace(config, model=replace(config.model, tie_embeddings=False))
    with pytest.raises(UserError, match=r"not finite after step 7\. The last good .*step-00000006"):
        train(config, tmp_path / "run")
    saved = checkpoints(tmp_path / "run" / "checkpoints")
    assert [folder.name for folder in saved] == ["step-00000005", "step-00000006"]
    assert (tmp_path / "run" / "diverged.json").exists()


@pytest.mark.parametrize("harm", ["moved", "removed", "replaced"])
def test_a_run_whose_folder_goes_away_ends_at_its_next_save(tmp_path, monkeypatch, harm):
    out, real = tmp_path / "run", loop.update

    def update(run, number, loss):
        if number == 3 and harm == "moved":
            out.rename(tmp_path / "elsewhere")
        elif number == 3 and harm == "removed":
            shutil.rmtree(out)
        elif number == 3:
            (out / ".lock").unlink()  # and so another process may begin here
            Path(shutil.copy(out / "metrics.jsonl", tmp_path)).replace(out / "metrics.jsonl")
        return real(run, number, loss)

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(UserError, match=r"metrics\.jsonl is no longer the file"):
        train(tiny(tmp_path), out)
    assert not (out / "summary.json").exists()
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


@pytest.mark.parametrize("harm", ["gone", "zeros", "foreign"])
def test_a_log_that_is_not_what_was_written_is_told_on_resume(run_folder, capfd, harm):
    log = run_folder / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    if harm == "gone":
        log.unlink()
    elif harm == "zeros":
        log.write_bytes(b"".join([*lines[:3], b"\0" * 40, b"\n", *lines[4:]]))
    else:
        log.write_bytes(b"".join(lines[:3]) + lines[3].replace(b"loss", b"lass") + lines[4])
    train(more_steps(run_folder, 14), run_folder, resume=True)
    count = {"gone": 0, "zeros": len(lines) - 1, "foreign": 5}[harm]
    assert f"not what was written until step 12: {count} records" in capfd.readouterr().err
    train(more_steps(run_folder, 16), run_folder, resume=True)
    assert not capfd.readouterr().err


def test_a_loss_spike_is_left_out_and_a_resumed_run_decides_alike(tmp_path, monkeypatch):
    config = tiny(tmp_path, save_every=1, keep=99, skip_spikes=2, spike_window=4)
    spikes(monkeypatch, 3, 7, 8)  # the first comes before there are losses to measure it against
    weights = weights_after_updates(monkeypatch)
    assert train(config, tmp_path / "whole").skipped_steps == 2
    whole = fingerprint(tmp_path / "whole")
    records = [r for r in whole["metrics"] if r["kind"] == "skip"]
    assert [(r["step"], r["reason"]) for r in records] == [(7, "spike"), (8, "spike")]
    taken = [
        r["loss"] for r in whole["metrics"] if r["kind"] == "train" and r["step"] in (3, 4, 5, 6)
    ]
    deviation = np.median(np.abs(taken - np.median(taken)))
    assert records[0]["threshold"] == pytest.approx(np.median(taken) + 6 * 1.4826 * deviation)
    assert records[0]["loss"] > records[0]["threshold"] == records[1]["threshold"]
    for step in range(2, 13):
        assert torch.equal(weights[step], weights[step - 1]) == (step in (7, 8)), step
    saved = [folder.name for folder in checkpoints(tmp_path / "whole/checkpoints")]
    assert saved == [f"step-{step:08d}" for step in range(1, 13) if step not in (7, 8)]
    cause = json.loads((tmp_path / "whole" / "spike-step-7.json").read_text())
    assert cause["batch"] == {"seed": 0, "step": 6, "size": 4}

    for cut in (5, 7):  # with a window half filled, and between two spikes
        cut_off(config, tmp_path / f"cut{cut}", monkeypatch, at_step=cut + 1)
        train(config, tmp_path / f"cut{cut}", resume=True)
        assert fingerprint(tmp_path / f"cut{cut}") == whole


def slow_writes(monkeypatch, seconds: float = 0.0, failing: int | None = None) -> list[int]:
    """Writing takes a while, or fails from a step on; returns the steps whose weights were written."""
    real, steps = shards.write_file, []

    def write_file(path, content):
        step = int(path.parent.name.rpartition("-")[2])
        if path.name == "model.safetensors":
            time.sleep(seconds)
            steps.append(step)
            if failing is not None and step >= failing:
                raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(shards, "write_file", write_file)
    return steps


def test_saving_in_the_background_writes_what_saving_at_once_does(tmp_path, monkeypatch):
    """Each save takes longer than the steps meanwhile, which must neither wait for it nor change what it writes."""
    config = tiny(tmp_path, save_every=3, keep=99)
    train(config, tmp_path / "sync")
    slow_writes(monkeypatch, seconds=0.5)
    overtaken = []
    real = loop.log_update

    def log_update(run, *values):
        real(run, *values)
        overtaken.append(run.saver.thread is not None and run.saver.thread.is_alive())

    monkeypatch.setattr(loop, "log_update", log_update)
    train(replace(config, train=replace(config.train, async_save=True)), tmp_path / "async")
    assert any(overtaken)
    for one, other in zip(
        *(checkpoints(tmp_path / name / "checkpoints") for name in ("sync", "async")), strict=True
    ):
        assert damage(other) is None
        for file in ("model.safetensors", "optimizer.safetensors", "index.json"):
            assert (one / file).read_bytes() == (other / file).read_bytes(), (one.name, file)
    assert fingerprint(tmp_path / "sync") == fingerprint(tmp_path / "async")


def test_copies_for_the_background_keep_their_place(tmp_path):
    buffers, weight = HostBuffers(), torch.arange(6.0)
    first = buffers.take({"weight": weight})["weight"]
    weight += 1
    assert torch.equal(first, torch.arange(6.0))
    assert buffers.take({"weight": weight})["weight"].data_ptr() == first.data_ptr()
    assert torch.equal(first, weight)
    # An optimizer has state after its first step
    more = buffers.take({"weight": weight, "later": weight})
    assert all(torch.equal(copy, weight) for copy in more.values())


def test_copies_for_the_background_are_written_in_few_pieces(monkeypatch):
    monkeypatch.setattr(HostBuffers, "BLOCK", 100)
    count = torch.arange(3, dtype=torch.int64)
    tensors = {
        "b": torch.randn(5),
        "half": torch.randn(3).bfloat16(),
        "a": torch.randn(2, 3),
        "count": count,
    }
    tensors["large"] = torch.randn(40)
    copies = HostBuffers().take(tensors)
    parts = list(shards.encode(copies))
    assert b"".join(parts) == b"".join(shards.encode(tensors))
    # Count, a and b; large, by itself; half
    assert [len(part) for part in parts[1:]] == [24 + 24 + 20, 160, 6]
    assert len(list(shards.encode(tensors))) == 6
    assert (
        copies["half"].untyped_storage().data_ptr() == copies["count"].untyped_storage().data_ptr()
    )


def test_a_save_keeps_plans_and_no_tensors(tmp_path):
    run = begin(tiny(tmp_path, async_save=True), tmp_path / "run", resume=False)
    save(run)  # before the optimizer has any state
    run.saver.wait()
    before = weakref.ref(next(iter(run.saver.buffers.buffers.values())))
    update(run, 1, accumulate(run, 1))
    run.step = 1
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


def test_a_copy_that_takes_its_time_is_waited_for_by_the_next_update_and_by_the_file(
    tmp_path, monkeypatch
):
    run = begin(tiny(tmp_path, async_save=True), tmp_path / "run", resume=False)
    run.saver.buffers = LateBuffers()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: run.saver.buffers)
    for number in (1, 2):
        update(run, number, accumulate(run, number))
        run.step = number
        if number == 1:
            saved = {name: tensor.clone() for name, tensor in run.model.named_parameters()}
            save(run)
    run.saver.wait()
    run.log.close()
    written = read_all(tmp_path / "run" / "checkpoints" / "step-00000001", "model")
    assert all(torch.equal(written[name], tensor) for name, tensor in saved.items())
    assert not all(
        torch.equal(tensor, saved[name]) for name, tensor in run.model.named_parameters()
    )


def test_a_failing_write_in_the_background_stops_the_run_at_one_of_the_next_steps(
    tmp_path, monkeypatch
):
    config = tiny(
        tmp_path, steps=200, eval_every=200, depth_every=200, save_every=50, async_save=True
    )
    slow_writes(monkeypatch, failing=100)
    with pytest.raises(
        UserError, match=r"could not write .*step-00000100: No space left.*good .*step-00000050"
    ):
        train(config, tmp_path / "run")
    assert fingerprint(tmp_path / "run")["metrics"][-1]["step"] < 150, (
        "it was noticed by the next save only"
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000050"]


@pytest.mark.parametrize("steps", [5, 12])
def test_a_failing_last_write_in_the_background_is_an_error(tmp_path, monkeypatch, steps):
    """At the end of a run, and when another error has already ended it."""
    config = tiny(tmp_path, steps=steps, save_every=5, async_save=True)
    slow_writes(monkeypatch, seconds=0.3, failing=5)
    if steps == 5:
        with pytest.raises(UserError, match="could not write"):
            train(config, tmp_path / "run")
    else:
        cut_power(monkeypatch, at_step=6)
        with pytest.raises(PowerCut):  # which ended it; the write has yet to fail
            train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def test_depth_records(tmp_path):
    for residual in ("standard", "attnres-full"):
        train(tiny(tmp_path, residual=residual), tmp_path / residual)
        records = [r for r in fingerprint(tmp_path / residual)["metrics"] if r["kind"] == "depth"]
        assert [record["step"] for record in records] == [6, 12]
        model, _ = load_model(tmp_path / residual)
        data = prepare(tiny(tmp_path).data).windows("validation", 32)
        with torch.no_grad(), record_of(model.residual) as trace:
            model(torch.from_numpy(data.take(data.spread(1)))[:, :-1])
        sizes = [y.square().mean().sqrt().item() for y in trace.sources[1:]]
        assert records[-1]["output_norm"] == pytest.approx(sizes, rel=1e-4)
        sizes = [x.square().mean().sqrt().item() for x in trace.reads]
        assert records[-1]["read_norm"] == pytest.approx(sizes, rel=1e-4)
        for record in records:
            assert record["sublayers"] == ["attention", "mlp"] * 2
            for key, count in (("output_norm", 4), ("gradient_norm", 4), ("read_norm", 5)):
                assert len(record[key]) == count
                assert min(record[key]) > 0
            mixing = np.array(record["mixing"])
            assert np.allclose(mixing, np.tril(mixing))
            if residual == "standard":
                assert np.allclose(mixing, np.tril(np.ones((5, 5))), atol=1e-4)
                assert record["entropy"] == pytest.approx(
                    [math.log(row + 1) for row in range(5)], abs=1e-4
                )
            else:
                assert np.allclose(mixing.sum(1), 1, atol=1e-4)
                assert all(e <= math.log(row + 1) + 1e-4 for row, e in enumerate(record["entropy"]))


def test_gradients_by_depth_are_those_before_clipping(tmp_path):
    taken = {}
    for limit in (1e-3, 1e3):
        config = tiny(tmp_path, depth_every=1)
        run = begin(
            replace(config, optim=replace(config.optim, clip=limit)),
            tmp_path / str(limit),
            resume=False,
        )
        (taken[limit],) = loop.HostStep(run).take(1)
        run.log.close()
    assert taken[1e-3].depth == taken[1e3].depth
    assert 0.1 < math.hypot(*taken[1e3].depth) < taken[1e3].grad_norm == taken[1e-3].grad_norm


def test_summary_and_resolved_configuration(run_folder):
    keys = "residual seed parameters residual_parameters flops_per_token tokens steps seconds peak_memory_bytes loss"
    others = "skipped_steps bits_per_byte device torch headwater code source_hash tokenizer_hash"
    saved = read_json(run_folder / "summary.json")
    assert saved.pop("hash")
    assert set(saved) == {*keys.split(), *others.split()}
    summary = TrainResult.read(run_folder)
    assert {**saved, "folder": run_folder} == asdict(summary)
    assert summary.tokens == STEPS * 4 * 32
    assert summary.peak_memory_bytes > 50 * 2**20
    assert summary.code == code_of()
    config = read_settings(run_folder)
    assert summary.source_hash == prepare(config.data).identity["source_hash"]
    assert (config.model.residual, config.model.vocab_size) == ("attnres-block:block=2", 320)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_meets_its_optimizer_once(optimizer):
    for residual in names():
        model = Decoder(
            ModelConfig(
                vocab_size=64,
                dim=16,
                layers=2,
                heads=2,
                mlp_dim=32,
                qk_norm=True,
                residual=residual,
            )
        )
        optimizers = build_optimizers(model, OptimSettings(optimizer=optimizer))
        homes = {}
        for kind, built in optimizers.items():
            for group in built.param_groups:
                for parameter in group["params"]:
                    assert id(parameter) not in homes
                    homes[id(parameter)] = (kind, group["weight_decay"])
        for name, parameter in model.named_parameters():
            hidden = name.startswith("sublayers.") and parameter.ndim == 2
            assert homes[id(parameter)] == ((optimizer, 0.1) if hidden else ("adamw", 0.0)), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_has_the_settings_that_were_asked_for(optimizer):
    """Muon at the scale of AdamW, whose rate and decay it shares: a number of either moves by about 0.2 rates."""
    model = Decoder(ModelConfig(vocab_size=64, dim=16, layers=2, heads=2, mlp_dim=32))
    settings = OptimSettings(optimizer=optimizer, lr=0.25, beta1=0.7, beta2=0.8, weight_decay=0.3)
    built = build_optimizers(model, settings)
    for group in built["adamw"].param_groups:
        assert (group["lr"], group["betas"]) == (0.25, (0.7, 0.8))
    decays = {
        group["name"]: group["weight_decay"]
        for kind in built.values()
        for group in kind.param_groups
    }
    assert decays == {"matrices": 0.3, "rest": 0.0}
    if optimizer == "muon":
        (group,) = built["muon"].param_groups
        assert (group["lr"], group["adjust_lr_fn"]) == (0.25, "match_rms_adamw")
        matrix = model.sublayers[1].body.gate.weight
        before = matrix.detach().clone() * (1 - 0.25 * 0.3)
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        built["muon"].step()
        assert (matrix - before).square().mean().sqrt().item() == pytest.approx(0.2 * 0.25, rel=0.2)


def test_a_step_sees_the_batch_of_its_seed_and_number(tmp_path):
    seen = {}
    for seed in (0, 7):
        run = begin(tiny(tmp_path, seed=seed, accumulate=2), tmp_path / str(seed), resume=False)
        for number, micro in ((1, 0), (1, 1), (2, 0)):
            expected = run.train.batch(seed=seed, step=number - 1, size=4, micro=micro, micros=2)
            seen[seed, number, micro] = windows_of(run, number, micro)
            assert torch.equal(seen[seed, number, micro], torch.from_numpy(expected))
        run.log.close()
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(seen.values(), 2))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_factor_of_the_queries_is_on_every_rate_of_the_schedule(optimizer):
    model = Decoder(
        ModelConfig(vocab_size=64, dim=16, layers=2, heads=2, mlp_dim=32, residual="attnres-full")
    )
    optimizers = build_optimizers(model, OptimSettings(optimizer=optimizer, query_lr=0.1))
    for rate in (0.5, 0.25):
        set_learning_rate(optimizers, rate)
        rates = {
            group["name"]: group["lr"]
            for built in optimizers.values()
            for group in built.param_groups
        }
        assert rates == {"matrices": rate, "rest": rate, "queries": rate * 0.1}


def test_schedules():
    cosine = OptimSettings(lr=1.0, warmup=10, final_lr=0.1)
    assert [learning_rate(s, 100, cosine) for s in (0, 4, 9, 10)] == pytest.approx(
        [0.1, 0.5, 1.0, 1.0]
    )
    assert learning_rate(55, 100, cosine) == pytest.approx(0.55)
    assert learning_rate(99, 100, cosine) == pytest.approx(0.1, abs=1e-3)
    wsd = replace(cosine, schedule="wsd", decay=0.2, final_lr=0.0)
    assert [learning_rate(s, 100, wsd) for s in (9, 10, 50, 80, 90, 99)] == pytest.approx(
        [1, 1, 1, 1, 0.5, 0.05]
    )


def test_a_run_goes_on_where_its_text_lies_now(tmp_path, monkeypatch):
    """It is another machine, or another folder: the tokens are the same, to the last."""
    config = tiny(tmp_path)
    whole = train(config, tmp_path / "whole")
    cut_off(config, tmp_path / "run", monkeypatch, at_step=8)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    data = replace(config.data, source=(str(tmp_path / "moved"),), cache=str(tmp_path / "other"))
    moved = replace(config, data=data)
    assert train(moved, tmp_path / "run", resume=True).loss == whole.loss
    assert fingerprint(tmp_path / "run")["files"] == fingerprint(tmp_path / "whole")["files"]
    assert read_json(tmp_path / "run" / "config.json")["data"]["source"] == [
        str(tmp_path / "moved")
    ]


def test_a_corpus_that_changed_is_not_continued(tmp_path, monkeypatch):
    config = tiny(tmp_path)
    cut_off(config, tmp_path / "run", monkeypatch, at_step=8)
    (write_corpus(tmp_path) / "more.txt").write_text("a text that was not there before " * 20)
    with pytest.raises(
        UserError,
        match=r"(?s)on other text:\n  corpus.source_hash.*Name with data.source the text.*train.init_from .*step-",
    ):
        train(config, tmp_path / "run", resume=True)
