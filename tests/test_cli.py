"""The command: help, precedence of settings, and one message for each thing a user can get wrong."""

import errno
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import SafetensorError
from tinyrun import flags, tiny

import headwater
import headwater.generation.text_pieces
import headwater.train
from headwater.analyze import matrix as matrix_module
from headwater.analyze import rates as rates_module
from headwater.analyze import report as report_module
from headwater.analyze import runs as runs_module
from headwater.analyze import scaling as scaling_module
from headwater.analyze import scaling_report as scaling_report_module
from headwater.analyze import table as table_module
from headwater.analyze.scaling import Scaling
from headwater.cli import COMMANDS, main
from headwater.cli.flags import DEMO, THEIRS, flag_of, sized
from headwater.errors import UserError
from headwater.folders import whole_folder
from headwater.generation.sampling import Sampling
from headwater.models import SIZES, ModelConfig, decoder
from headwater.train import (
    Config,
    DataSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    TrainSettings,
    load_file,
    loop,
    train,
)
from headwater.train import studies as studies_module
from headwater.train.checkpoint.folder import checkpoints, load_model
from headwater.train.comparison import admit
from headwater.train.config import check
from headwater.train.data.tokenizer import BPETokenizer, ByteTokenizer
from headwater.train.distributed import plan as plan_module
from headwater.train.files import write_json
from headwater.train.run import named_model


def fails(capsys, *argv: str) -> str:
    """The one message of a command that fails."""
    capsys.readouterr()
    code = main([str(word) for word in argv])
    message = re.sub(
        r"\Atext: .*\n", "", capsys.readouterr().err
    )  # what was found, where that is not what is wrong
    assert code != 0
    assert message.startswith("headwater: ")
    assert "Traceback" not in message
    return message


def test_help_names_every_command(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "compare", "report", "generate", "demo"))
    assert "did you mean 'compare'?" in fails(capsys, "compar")


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--steps", "0"],
        ["compare", "--lr", "-1"],
        ["plan", "--batch-size", "0"],
        ["generate", "x", "--top-p", "2"],
    ],
)
def test_bad_numbers_are_refused_before_torch_is_imported(argv):
    program = "import sys; from headwater.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", f"{program}; sys.exit(code)", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "must" in done.stderr
    assert "Assertion" not in done.stderr


def test_a_message_about_a_folder_names_its_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    begun = flags(tiny(tmp_path), tmp_path / "run")[:-1]
    assert "choose another path with --out" in fails(capsys, *begun, tmp_path / "file" / "run")
    assert (
        flag_of(["train", "--out=runs/a", "--cache", "text/cache"], "text/cache/x/manifest.json")
        == "--cache"
    )
    assert (
        flag_of(
            ["train", "--out=runs/a", "--cache", "text/cache"], str(tmp_path / "runs/a/config.json")
        )
        == "--out"
    )
    assert flag_of(["train"], "runs/train/config.json") is None


def test_a_flag_that_is_only_read_is_not_in_the_way_of_what_is_written(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("river " * 2000)
    base = [*flags(tiny(tmp_path), out), "--source", text]
    assert (
        f"{text}. A file stands where a folder is needed: choose another path with --cache"
        in fails(capsys, *base, "--cache", text)
    )
    assert "choose another path with --out" in fails(capsys, *base, "--out", text)


def test_a_folder_that_cannot_be_made_is_answered_with_its_flag(tmp_path, capsys):
    base = flags(tiny(tmp_path), tmp_path / "run")
    for flag in ("--cache", "--out"):
        message = fails(capsys, *base, flag, "/proc/nowhere")
        assert message.endswith(f"choose another path with {flag}\n")
        assert "again" not in message


def test_a_run_folder_is_a_configuration_and_no_recipe(tmp_path, capsys, called):
    config = tiny(tmp_path, steps=7)
    (tmp_path / "first").mkdir()
    write_json(tmp_path / "first" / "config.json", asdict(config))
    arguments = called(headwater.train, "train", SimpleNamespace(bits_per_byte=1.0, steps=7))
    assert main(["train", "--config", str(tmp_path / "first"), "--out", str(tmp_path / "run")]) == 0
    assert arguments["config"] == config
    assert f"no configuration file at {tmp_path / 'config.json'}" in fails(
        capsys, "train", "--config", tmp_path
    )
    message = fails(capsys, "study", tmp_path / "first")
    assert (
        f"{tmp_path / 'first'} is a folder, and a recipe is a TOML file that names settings"
        in message
    )
    assert "Errno" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_torchrun_starts_what_divides_its_work_and_nothing_else(capsys, monkeypatch, command):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(COMMANDS, command, print)
    assert main([command]) == 0  # a shell of a cluster
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if command in ("train", "generate"):
        assert main([command]) == 0
    else:
        said = (
            f"headwater: {command} is the work of one process, and torchrun has started 2: "
            f"start headwater {command} "
        )
        assert fails(capsys, command).startswith(said)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun with one process, too
    assert main([command]) == 0


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
def test_a_misspelt_size_is_told_before_the_folder_and_the_text(tmp_path, capsys, command):
    (tmp_path / "config.json").write_text("{}")  # of a run that is there
    message = fails(
        capsys, command, "--size", "nanoo", *(["--out", tmp_path] if command != "plan" else [])
    )
    assert "unknown size 'nanoo'; did you mean 'nano'? Valid: deep, " in message


@pytest.mark.parametrize(("theirs", "ours"), THEIRS.items())
def test_names_of_other_trainers_are_answered_with_ours(capsys, theirs, ours):
    assert (
        fails(capsys, "train", theirs, "3")
        == f"headwater: unknown flag {theirs}: here it is {ours}\n"
    )
    assert ours in {
        f"--{name.replace('_', '-')}" for part in vars(Config()).values() for name in vars(part)
    }
    written = theirs.replace("-", "_").replace("__", "--")
    assert f"here it is {ours}" in fails(capsys, "compare", f"{written}=3")


def test_narrow_terminals_keep_names_and_numbers(capsys, monkeypatch):
    for width, name in ((40, "hyper-connections:streams=2,form=static"), (120, "attnres-block")):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["residuals", name]) == 0
        lines = list(
            itertools.takewhile(
                lambda line: "sum_" not in line, capsys.readouterr().out.splitlines()
            )
        )
        assert name in "".join(lines).replace(" ", "")
        assert "eager" in "".join(lines)
        assert "…" not in "".join(lines)
        assert max(map(len, lines)) <= width


def test_a_named_residual_shows_its_options(capsys):
    assert main(["residuals", "attnres-block:block=2"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "block=none  a whole number or none",
        "key_norm=true  true or false",
        "weights=softmax  one of softmax,",
    ):
        assert line in shown
    assert "At initialisation: queries are zero" in shown
    assert main(["residuals"]) == 0
    assert "key_norm=" not in capsys.readouterr().out


def test_version_help_and_python_m(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwater {headwater.__version__}\n"
    assert main(["help"]) == 0
    assert "usage: headwater COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "train"])
    assert "usage: headwater train" in capsys.readouterr().out
    assert "did you mean 'train'?" in fails(capsys, "help", "trian")
    shown = subprocess.run(
        [sys.executable, "-m", "headwater", "-V"], capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"headwater {headwater.__version__}\n"


@pytest.mark.parametrize("module", ["tyro", "torch"])
@pytest.mark.parametrize("name", ["headwater.__main__", "headwater"])  # the script, python -m
def test_ctrl_c_while_the_command_is_imported_is_a_line(tmp_path, module, name):
    """A library that takes the interruption for a package that is not installed does not hide it."""
    hiding = (
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n    pass\n"
    )
    (tmp_path / f"{module}.py").write_text(hiding)
    begin = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        f"sys.argv = ['headwater', 'train']\nrunpy.run_module({name!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "headwater: stopped by Ctrl-C\n")
    project = Path(inspect.getfile(headwater)).parents[1] / "pyproject.toml"
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    assert scripts == {"headwater": "headwater.__main__:main"}


def test_help_says_what_none_is_of_a_switch(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = dict(re.findall(r"--([a-z0-9-]+) \{None,(.*?) \(default: None\)", shown))
    assert {"qk-norm", "kda-gate"} <= found.keys()
    for flag, said in found.items():
        name = flag.replace("-", "_")
        assert "default" in said, flag
        assert not any(name in size for size in SIZES.values()), flag
        assert not ("Off by default" in said and getattr(ModelConfig, name)), flag


def test_defaults_then_file_then_flags(tmp_path, monkeypatch):
    seen = []
    done = SimpleNamespace(bits_per_byte=1.0, steps=1)
    monkeypatch.setattr(loop, "train", lambda config, out, resume: seen.append(config) or done)
    (tmp_path / "run.toml").write_text(
        '[optim]\nlr = 1\nwarmup = 7\n[data]\nsource = ["a", "b"]\n[model]\nqk_norm = true\n'
    )
    assert (
        main(
            [
                "train",
                "--config",
                str(tmp_path / "run.toml"),
                "--warmup",
                "9",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    (config,) = seen
    assert config.optim.lr == 1.0
    assert config.optim.warmup == 9
    assert config.data.source == ("a", "b")
    assert config.model.qk_norm is True
    assert config.train == Config().train


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nwarmpu = 3", "unknown key 'warmpu'; did you mean 'warmup'?"),
        ("[optm]\nlr = 3", "unknown key 'optm'; did you mean 'optim'?"),
        ("lr = 3", "unknown key 'lr'; it stands under [optim]"),
        ("[train]\nwarmup = 3", "train: unknown key 'warmup'; it stands under [optim]"),
        ("[train]\nsteps = 1.5", "steps must be an integer; got 1.5"),
        ("[train]\nsteps = true", "steps must be an integer; got True"),
        ("[train]\ndeterministic = 1", "deterministic must be true or false; got 1"),
        ("[optim]\noptimizer = 'sgd'", "optimizer must be 'adamw' or 'muon'; got 'sgd'"),
        ("[data]\nsource = 'text'", "source must be a list of strings; got 'text'"),
        ("[model]\ndim = 'wide'", "dim must be an integer or null; got 'wide'"),
        ("[train]\nsteps = ", "cannot read the configuration"),
        (
            "name = 'x'\n[[runs]]\n'optim.lr' = [1.0]",
            "is a recipe of several runs: make them with headwater study /",
        ),
    ],
)
def test_a_bad_configuration_file_is_explained(tmp_path, capsys, text, message):
    (tmp_path / "bad.toml").write_text(text)
    shown = fails(capsys, "train", "--config", tmp_path / "bad.toml", "--out", tmp_path / "run")
    assert "bad.toml" in shown
    assert message in shown
    assert not (tmp_path / "run").exists()


def test_settings_of_a_newer_release_are_said_to_be_so(tmp_path, capsys):
    train(tiny(tmp_path, steps=2), tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    write_json(tmp_path / "run" / "config.json", {**saved, "train": {**saved["train"], "warp": 9}})
    for words in (["train", "--resume", "--out"], ["generate"]):
        message = fails(capsys, *words, tmp_path / "run")
        assert "unknown key 'warp'" in message
        assert "If a newer headwater wrote it, read it with that" in message


def test_a_checkpoint_to_resume_is_answered_with_its_run(tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny(tmp_path, steps=2), run)
    checkpoint = checkpoints(run / "checkpoints")[-1]
    message = fails(capsys, "train", "--resume", "--out", checkpoint)
    assert f"{checkpoint} is a checkpoint, " in message
    assert f"--resume with --out {run}, or begin a run" in message
    assert message.endswith(f"--init-from {checkpoint}\n")


def test_a_misspelt_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--warmpu", "3"])
    assert caught.value.code == 2
    assert "--warmup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "train.steps must be at least 1; got 0"),
        (
            {"batch_size": 6, "accumulate": 4},
            r"train.batch_size \(6\) must be a multiple of train.accumulate \(4\)",
        ),
    ],
)
def test_values_out_of_range(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        check(tiny(tmp_path, **changes))
    check(tiny(tmp_path))


@pytest.mark.parametrize(
    ("key", "least"),
    [
        *((f"parallel.{key}", 1) for key in ("pipeline", "chunks", "tensor")),
        *((f"parallel.{key}", 0) for key in ("shard", "hang_timeout")),
        *((f"train.{key}", 0) for key in ("seed", "skip_nonfinite", "skip_spikes")),
        ("train.spike_window", 2),
        ("optim.warmup", 0),
        ("data.bpe_vocab", 257),
    ],
)
def test_each_number_has_its_least_value(tmp_path, key, least):
    config, (section, name) = tiny(tmp_path), key.split(".")
    below, at = (
        replace(config, **{section: replace(getattr(config, section), **{name: value})})
        for value in (least - 1, least)
    )
    with pytest.raises(UserError, match=f"{key} must be at least {least}; got {least - 1}"):
        check(below)
    check(at)


def test_shares_and_rates_out_of_range(tmp_path):
    config = tiny(tmp_path)
    for change in (
        {"lr": 0.0},
        {"lr": float("nan")},
        {"beta1": 1.0},
        {"final_lr": 2.0},
        {"clip": -1.0},
    ):
        with pytest.raises(UserError, match=f"optim.{next(iter(change))} must"):
            check(replace(config, optim=replace(config.optim, **change)))
    with pytest.raises(UserError, match=r"data.validation must"):
        check(replace(config, data=replace(config.data, validation=0.0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": DataSettings(source="my.txt")}, "source must be a list of strings; got 'my.txt'"),
        ({"train": TrainSettings(steps="20")}, "steps must be an integer; got '20'"),
        (
            {"optim": OptimSettings(optimizer="sgd")},
            "optimizer must be 'adamw' or 'muon'; got 'sgd'",
        ),
        ({"model": "nano"}, "expected a section of keys, got 'nano'"),
    ],
)
def test_a_configuration_made_in_python_is_held_to_its_types(tmp_path, change, message):
    with pytest.raises(UserError, match=f"^the configuration: .*{message}"):
        train(Config(**change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", [{"train": {"steps": 2}}, "run.toml"])
def test_what_is_no_configuration_is_refused(tmp_path, config):
    with pytest.raises(
        UserError,
        match=r"must be a headwater.train.Config; got a (dict|str): `load_file` makes one",
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lists_and_whole_numbers_will_do_in_python():
    config = check(Config(data=DataSettings(source=["a", "b"]), optim=OptimSettings(lr=1)))
    assert config == Config(data=DataSettings(source=("a", "b")), optim=OptimSettings(lr=1.0))


def test_numbers_of_numpy_will_do_in_python(tmp_path):
    """As from a sweep over an array; config.json is then written as ever."""
    given = Config(
        train=TrainSettings(steps=np.int64(3), graph=np.bool_(True), init_from=np.str_("there")),
        optim=OptimSettings(lr=np.float32(0.5), clip=np.int32(2)),
        parallel=ParallelSettings(cuts=[np.int64(2), 4]),
    )
    plain = Config(
        train=TrainSettings(steps=3, graph=True, init_from="there"),
        optim=OptimSettings(lr=0.5, clip=2.0),
        parallel=ParallelSettings(cuts=(2, 4)),
    )
    assert json.dumps(asdict(check(given))) == json.dumps(asdict(plain))
    with pytest.raises(UserError, match=r"steps must be an integer; got 3\.0"):
        check(Config(train=TrainSettings(steps=np.float64(3))))
    _, seeds = admit(plain, ["standard"], np.arange(2), 1)
    assert json.dumps(seeds) == "[0, 1]"


def test_a_path_after_an_equals_sign_leads_home_too(tmp_path, monkeypatch, called):
    """Where no shell has made a folder of the tilde: that of --resume is read before the other flags."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_json(tmp_path / "config.json", asdict(tiny(tmp_path, steps=7)))
    arguments = called(headwater.train, "train", SimpleNamespace(bits_per_byte=1.0, steps=7))
    assert main(["train", "--out=~", "--resume"]) == 0
    assert (arguments["config"].train.steps, arguments["out"]) == (7, tmp_path)
    assert main(["train", "--out=~nobodys"]) == 0
    assert str(arguments["out"]) == "~nobodys"


def test_model_settings_mirror_the_model_and_config_json_can_be_reused(tmp_path):
    names = {field.name for field in fields(ModelSettings)}
    assert names == {field.name for field in fields(ModelConfig)} | {"size"}
    config = tiny(tmp_path)
    resolved = {**asdict(config), "model": ModelConfig.named("tiny", vocab_size=320).to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(resolved))
    assert load_file(tmp_path / "config.json").train == config.train


def test_bad_input_ends_with_one_message(tmp_path, capsys):
    """What fails before the first step; the rest is in test_train, test_checkpoint and test_crash."""
    config, out = tiny(tmp_path), tmp_path / "run"
    base = flags(config, out)
    assert "no corpus at" in fails(capsys, *base, "--source", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "is empty" in fails(capsys, *base, "--source", tmp_path / "empty")
    (tmp_path / "short.txt").write_text("brief " * 20)
    message = fails(capsys, *base, "--source", tmp_path / "short.txt", "--context", "512")
    assert "shorter than the context" in message
    assert "lower --context" in message
    assert "heads" in fails(capsys, *base, "--heads", "3")
    assert "kv_heads" in fails(capsys, *base, "--kv-heads", "3")
    assert "block" in fails(capsys, *base, "--residual", "attnres-block:block=0")
    assert "heads" in fails(capsys, *base, "--residual", "attnres-full:heads=5")
    assert "Valid names" in fails(capsys, *base, "--residual", "attnres")
    assert "unknown size" in fails(capsys, *base, "--size", "enormous")
    assert "tokenizer has 257 tokens" in fails(capsys, *base, "--vocab-size", "100")
    assert "device 'tpu9'" in fails(capsys, *base, "--device", "tpu9")
    assert "no configuration file" in fails(capsys, "train", "--config", tmp_path / "no.toml")
    assert "--residuals and --seeds" in fails(
        capsys, "compare", "--residual", "standard:", "--out", out
    )
    (tmp_path / "file").write_text("")
    assert "choose another path" in fails(capsys, *base, "--out", tmp_path / "file" / "run")
    assert not checkpoints(out / "checkpoints")
    assert main(base) == 0  # the folder is still good for a run


def test_an_exploding_run_ends_with_one_message(tmp_path, capsys):
    message = fails(
        capsys, *flags(tiny(tmp_path), tmp_path / "run"), "--lr", "1e30", "--warmup", "0"
    )
    assert "the loss or gradient is not finite at step" in message
    assert "lower --lr" in message


def test_a_run_that_explodes_before_an_evaluation_ends_with_one_message(tmp_path, capsys):
    words = ["--lr", "1e30", "--warmup", "0", "--eval-every", "1", "--save-every", "1"]
    message = fails(capsys, *flags(tiny(tmp_path), tmp_path / "run"), *words)
    assert "the validation loss is not finite after step 1. There is no good checkpoint." in message
    assert not checkpoints(tmp_path / "run" / "checkpoints")
    assert "not finite after step 1" in (tmp_path / "run" / "diverged.json").read_text()


def test_resuming_what_is_not_there_is_refused(tmp_path, capsys):
    assert "there is no run at" in fails(
        capsys, *flags(tiny(tmp_path), tmp_path / "typo"), "--resume"
    )
    assert not (tmp_path / "typo").exists()


def test_size_as_a_flag_overrides_the_shape_in_a_file(tmp_path):
    shape = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_dim": 32, "context": 32}
    base = Config(model=ModelSettings(**shape))
    for words in (
        ["--dim", "16", "--mlp-dim", "32"],
        ["--dim=16", "--mlp_dim=32"],
    ):  # as in the file, and still asked
        asked = sized(
            replace(base, model=replace(base.model, size="nano")), ["--size", "nano", *words]
        ).model
        assert (asked.dim, asked.mlp_dim, asked.layers, asked.context) == (16, 32, None, None)
    assert sized(base, ["--dim", "16"]) is base


@pytest.mark.parametrize("run", SIZES)
def test_a_size_is_the_size_whatever_run_the_settings_are_of(run):
    """Its config.json spells out what its own size named, and all defaults beside it."""
    held = {**ModelConfig.named(run, vocab_size=512, norm_eps=1e-3).to_dict(), "qk_norm": True}
    for size, shape in SIZES.items():
        found = named_model(
            sized(Config(model=ModelSettings(**{**held, "size": size})), ["--size", size]).model,
            300,
        )
        kept = {"vocab_size": 512, "norm_eps": 1e-3, "qk_norm": True}  # unless the size names them
        assert found == ModelConfig(**{**kept, **shape})


def test_the_same_command_resumes_a_run_and_size_counts_for_a_plan(tmp_path, called):
    """Flags of the shape that say what the run has do not give way to --size."""
    model = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp_dim": 32, "context": 32}
    write_json(tmp_path / "config.json", asdict(Config(model=ModelSettings(**model))))
    shape = [
        "--size",
        "nano",
        "--dim",
        "16",
        "--layers",
        "1",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--context",
        "32",
    ]
    arguments = called(headwater.train, "train", SimpleNamespace(bits_per_byte=1.0, steps=7))
    assert main(["train", *shape, "--mlp-dim", "32", "--out", str(tmp_path), "--resume"]) == 0
    assert {key: getattr(arguments["config"].model, key) for key in model} == model
    planned, _ = called(plan_module, "make_plan"), called(plan_module, "describe", "")
    assert main(["plan", str(tmp_path / "config.json"), "--size", "nano", "--layers", "1"]) == 0
    assert (planned["model"].dim, planned["model"].layers) == (64, 1)


def test_generate_takes_a_folder_that_a_model_was_saved_to(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(flags(tiny(tmp_path), out)) == 0
    model, tokenizer = load_model(out)
    model.save(tmp_path / "saved")
    assert "no tokenizer" in fails(
        capsys, "generate", str(tmp_path / "saved"), "--max-new-tokens", "4"
    )
    tokenizer.save(tmp_path / "saved")
    assert (
        main(["generate", str(tmp_path / "saved"), "--prompt", "river ", "--max-new-tokens", "4"])
        == 0
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_nothing_is_written_into_a_folder_that_holds_something_else(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    config = tiny(tmp_path, steps=2)
    for folder in (run, other):
        assert main(flags(config, folder)) == 0
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.md").write_text("mine")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    before = snapshot(tmp_path)
    checkpoint = checkpoints(run / "checkpoints")[-1]
    for out in (run, other, checkpoint, tmp_path / "notes", tmp_path / "llama"):
        assert "holds something else (" in fails(capsys, "export", run, "--out", out)
    new = flags(config, tmp_path / "new")[:-1]
    for out in (run / "checkpoints", checkpoint, tmp_path / "notes", tmp_path / "llama", tmp_path):
        assert "holds something else (" in fails(capsys, *new, out)
        assert "holds something else (" in fails(
            capsys, "compare", *new[1:-1], "--seeds", "0", "--out", out
        )
    with pytest.raises(UserError, match=r"holds something else \(its config.json is not a run's\)"):
        train(config, tmp_path / "llama", resume=True)
    assert "holds something else (checkpoints, config.json" in fails(
        capsys, "compare", *new[1:-1], "--out", run
    )
    after = snapshot(tmp_path)
    del after["new.json"]
    assert after == before
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0


def test_resuming_a_comparison_that_is_not_there_starts_nothing(tmp_path, capsys):
    assert "there is no comparison at" in fails(
        capsys, "compare", "--resume", "--out", tmp_path / "typo"
    )
    assert not (tmp_path / "typo").exists()


def test_a_lock_that_is_a_link_leaves_what_it_leads_to_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    assert "is a link, and a lock must be a file" in fails(
        capsys, *flags(tiny(tmp_path), tmp_path / "run")
    )
    assert (tmp_path / "precious").read_text() == "precious"


def test_logs_and_hidden_files_may_be_there_before_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("log.txt", "nohup.out", "mine.log", ".DS_Store"):
        (tmp_path / "run" / name).write_text("")
    assert main(flags(tiny(tmp_path, steps=2), tmp_path / "run")) == 0


def test_a_list_that_is_given_twice_is_refused(tmp_path, capsys):
    """Not cut down to what came last in silence."""
    out = ("--out", tmp_path / "out")
    said = "is given twice: give it once, with all its values after it"
    both = "--residuals and --arms are one flag: give it once, with all its values after it"
    assert both in fails(capsys, "compare", "--arms", "standard", "--residuals", "mhc", *out)
    assert f"--arms {said}" in fails(capsys, "compare", "--arms", "standard", "--arms", "mhc", *out)
    assert f"--residuals {said}" in fails(
        capsys, "compare", "--residuals", "standard", "--residuals", "mhc", *out
    )
    assert f"--source {said}" in fails(capsys, "train", "--source", "a.txt", "--source=b.txt", *out)
    assert f"--prompt {said}" in fails(
        capsys, "generate", tmp_path, "--prompt", "a", "--prompt", "b"
    )


def test_a_run_with_two_residuals_is_sent_to_a_comparison(tmp_path, capsys):
    words = ("--steps", "0", "--residual", "mhc", "--residual=standard", "--out", tmp_path / "out")
    assert (
        "a run has one residual: give it once; or train a run with each: headwater compare"
        in fails(capsys, "train", *words)
    )


def test_a_full_disk_sends_to_a_flag_that_the_command_has(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = tmp_path / "page.html"
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        report_module.write_page(page, "<!doctype html>")
    assert not list(tmp_path.iterdir())  # nothing is left half written
    monkeypatch.setattr(report_module, "write_report", full)
    assert "Make room, then run the same command again" in fails(capsys, "report", tmp_path)
    monkeypatch.setattr(loop, "train", full)
    monkeypatch.setattr(headwater.train, "train", full)
    assert "the same command with --resume" in fails(
        capsys, *flags(tiny(tmp_path), tmp_path / "run")
    )


def test_an_export_to_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    assert main(flags(tiny(tmp_path, steps=2), tmp_path / "run")) == 0
    words, real = (
        ["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")],
        decoder.save_file,
    )

    def full(tensors, path):
        path.write_bytes(b"the first ten")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(decoder, "save_file", full)
    assert (
        f"No space left on device: {tmp_path / 'exported'}. Make room, then run the same"
        in fails(capsys, *words)
    )
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr(decoder, "save_file", real)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "log.txt").write_text("mine")  # logs may be there before
    assert main(words) == 0
    written = {"SHA256SUMS", "config.json", "log.txt", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == written
    with whole_folder(tmp_path / "exported") as folder:
        assert folder.parent == tmp_path / "exported"  # which may be a volume of its own
    assert "A file stands where a folder is needed" in fails(
        capsys, *words[:-1], tmp_path / "run" / "config.json"
    )
    page = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "run")]
    assert f"Is a directory: {tmp_path / 'run'}. A folder stands where a file is needed" in fails(
        capsys, *page
    )


def test_kernels_by_name_on_a_cpu_are_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for residual in ("attnres-full:backend=triton", "attnres-full:heads=2,backend=triton"):
        words = flags(tiny(tmp_path, residual=residual, device="cpu"), tmp_path / residual)
        assert re.search("the kernels need cuda|triton is not installed", fails(capsys, *words))


def test_generate_and_report_from_a_run(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(flags(tiny(tmp_path), out)) == 0
    capsys.readouterr()
    words = [
        "generate",
        str(out),
        "--prompt",
        "river ",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
    ]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("river ")
    assert main([*words[:1], str(checkpoints(out / "checkpoints")[-1]), *words[2:]]) == 0
    assert capsys.readouterr().out == first
    assert main(["report", str(out)]) == 0
    assert str(out / "report.html") in capsys.readouterr().out

    assert "100 new ones exceed" in fails(capsys, *words[:4], "--max-new-tokens", "100")
    assert "no checkpoint in" in fails(capsys, "generate", tmp_path / "nowhere")
    (tmp_path / "compare").mkdir()
    shutil.copytree(out, tmp_path / "compare" / "runs" / "one")
    assert (
        f"it holds 1 runs; give one of them, such as {tmp_path / 'compare' / 'runs' / 'one'}"
        in fails(capsys, "generate", tmp_path / "compare")
    )
    assert "is not a folder" in fails(capsys, "report", tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "compare" / "runs" / "one" / "checkpoints")
    for folder in (tmp_path / "compare", tmp_path / "compare" / "runs" / "one"):
        assert "with keep_weights = true in its recipe" in fails(capsys, "generate", folder)
    (tmp_path / "compare" / "runs" / "one" / "summary.json").unlink()
    assert "give the folder of a run that has saved one" in fails(
        capsys, "generate", tmp_path / "compare"
    )


@pytest.fixture
def called(monkeypatch):
    """Replaces functions that commands call, and notes the arguments of the last call by name."""

    def replace_with_note(module, name, result=None):
        calls, signature = {}, inspect.signature(getattr(module, name))

        def note(*args, **kwargs):
            calls.clear()
            calls.update(signature.bind(*args, **kwargs).arguments)
            return result

        monkeypatch.setattr(module, name, note)
        return calls

    return replace_with_note


def test_every_flag_of_generate_reaches_the_sampler(tmp_path, capsys, monkeypatch, called):
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(
        headwater.train,
        "load_run",
        lambda _, device: SimpleNamespace(model=device, tokenizer=tokenizer),
    )
    arguments = called(headwater.generation.text_pieces, "continue_texts", [["x", "y"], ["", "z"]])
    drawn = {
        "temperature": 0.3,
        "top_k": 5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    others = {"max_new_tokens": 7, "seed": 11, "prefill_chunk": 3}
    words = [
        word
        for name, value in {**drawn, **others}.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert (
        main(["generate", str(tmp_path), "--prompt", "ab", "cd", "--stop", "end", "stop", *words])
        == 0
    )
    assert arguments == {
        "model": "cpu",
        "tokenizer": tokenizer,
        "prompts": ["ab", "cd"],
        "sampling": Sampling(**drawn),
        "stops": ("end", "stop"),
        **others,
    }
    told = capsys.readouterr()
    assert told.out == "[ab] x\n[cd] yz\n"
    assert "2 tokens of each of 2 texts in " in told.err
    assert "--stream shows one text" in fails(
        capsys, "generate", tmp_path, "--prompt", "ab", "cd", "--stream"
    )


def test_a_text_is_streamed_and_ctrl_c_leaves_the_line(tmp_path, capsys, monkeypatch, called):
    loaded = SimpleNamespace(model="a model", tokenizer=ByteTokenizer())
    monkeypatch.setattr(headwater.train, "load_run", lambda *_: loaded)

    def pieces(**_):
        yield ["one "]
        yield ["two"]
        raise KeyboardInterrupt

    monkeypatch.setattr(
        headwater.generation.text_pieces, "continue_texts", lambda *_, **__: pieces()
    )
    assert main(["generate", str(tmp_path), "--prompt", "zero ", "--stream"]) == 130
    told = capsys.readouterr()
    assert told.out == "zero one two\n"
    assert told.err == "headwater: stopped by Ctrl-C after 2 tokens\n"


def test_a_resumed_comparison_has_the_residuals_and_seeds_that_it_began_with(tmp_path, called):
    config = tiny(tmp_path, steps=7)
    write_json(tmp_path / "settings.json", asdict(config))
    began = {"residuals": ["standard", "rezero"], "seeds": [3, 5], "config": asdict(config)}
    write_json(tmp_path / "compare.json", began)
    arguments = called(headwater.train, "compare")
    assert main(["compare", "--out", str(tmp_path), "--resume", "--jobs", "4"]) == 0
    assert arguments == {
        "config": config,
        "out": tmp_path,
        "residuals": ("standard", "rezero"),
        "seeds": (3, 5),
        "jobs": 4,
        "resume": True,
    }
    assert (
        main(["compare", "--out", str(tmp_path), "--resume", "--seeds", "8", "--residuals", "ddl"])
        == 0
    )
    assert (arguments["seeds"], arguments["residuals"], arguments["jobs"]) == ((8,), ("ddl",), 1)


def test_a_resumed_run_has_the_settings_that_it_began_with(tmp_path, called):
    config = tiny(tmp_path, steps=7)
    write_json(tmp_path / "config.json", asdict(config))
    arguments = called(headwater.train, "train", SimpleNamespace(bits_per_byte=1.0, steps=7))
    assert main(["train", "--out", str(tmp_path), "--resume", "--save-every", "3"]) == 0
    settings = replace(config, train=replace(config.train, save_every=3))
    assert arguments == {"config": settings, "out": tmp_path, "resume": True}


def test_the_flags_of_other_commands_reach_what_they_call(tmp_path, capsys, monkeypatch, called):
    folder = tmp_path / "my study"
    done = SimpleNamespace(folder=folder, finished={"a": 1})
    arguments = called(studies_module, "study", done)
    assert main(["study", "a.toml", "--out", str(tmp_path), "--minutes", "3", "--whole"]) == 0
    said = capsys.readouterr().out
    assert (
        f"table.json are in {folder}; look at them with: headwater report '{folder}', and headwater "
        in said
    )
    assert said.endswith(f" headwater scaling '{folder}' for three sizes or more\n")
    done.finished = {}
    assert main(["study", "a.toml", "--out", str(tmp_path), "--minutes", "3", "--whole"]) == 0
    assert not capsys.readouterr().out, "there is nothing to look at yet"
    assert arguments == {"recipe": Path("a.toml"), "out": tmp_path, "minutes": 3.0, "whole": True}

    read, rated = called(runs_module, "read_runs", []), called(rates_module, "at_rate", [])
    drawn = called(scaling_report_module, "write_plot", tmp_path)
    compared = called(scaling_module, "compare_scaling", [])
    assert main(["scaling", "a", "b", "--baseline", "rezero"]) == 0
    assert (read["folders"], rated["lr"]) == ([Path("a"), Path("b")], None)
    assert compared == {"points": {}, "baseline": "rezero"}
    assert drawn == {"found": [], "baseline": "rezero", "path": Path("a/scaling.svg")}
    for rate, lr in (
        ("best", "best"),
        ("6e-3", 0.006),
    ):  # --plugin: as every command that looks at runs
        assert main(["scaling", "a", "--lr", rate, "--out", "c.svg", "--plugin", "json"]) == 0
        assert (rated["lr"], drawn["path"]) == (lr, Path("c.svg"))
        assert ("Learning rates, by operations" in capsys.readouterr().out) == (lr == "best")
    summaries = [{"bits_per_byte": loss} for loss in (1.0, None, 1.0)]
    runs = [SimpleNamespace(summary=summary, extended=False) for summary in (None, *summaries)]
    called(rates_module, "at_rate", runs), called(scaling_module, "points_of", {})
    assert main(["scaling", "a"]) == 0
    assert (
        "Left out, as they have not finished or diverged: 2 of 4 runs\n" in capsys.readouterr().out
    )
    (
        called(runs_module, "read_runs", runs),
        called(rates_module, "at_rate", runs[-1:]),
    )  # the best has a result
    called(rates_module, "rates_by_budget", "")
    assert main(["scaling", "a", "--lr", "best"]) == 0
    assert (
        "Left out, as they have not finished or diverged: 2 of 4 runs\n" in capsys.readouterr().out
    )
    apart = {"a": ("optim.lr",), "b": ("optim.clip", "optim.lr")}
    monkeypatch.setattr(scaling_module, "confounders_of", lambda runs, baseline: apart)
    called(scaling_module, "compare_scaling", [Scaling(name, {}, None, None, {}) for name in apart])
    for rate, named in (
        ((), "a of optim.lr; b of optim.clip, optim.lr\n"),
        (("--lr", "best"), "b of optim.clip\n"),
    ):
        assert main(["scaling", "a", *rate]) == 0
        assert f"what it is worth is worth of them too: {named}" in capsys.readouterr().out

    rows = called(table_module, "residual_table", [])
    monkeypatch.setattr(table_module, "print_table", lambda rows: None)
    assert main(["residuals", "ddl", "rezero", "--dim", "32", "--layers", "3"]) == 0
    assert rows == {"specs": ("ddl", "rezero"), "dim": 32, "layers": 3}

    capsys.readouterr()
    plan = called(plan_module, "make_plan")
    monkeypatch.setattr(
        plan_module, "describe", lambda plan, memory, checkpointing: f"{memory} {checkpointing}"
    )
    for gpu in (True, False):
        words = [
            "--world",
            "8",
            "--memory",
            "3",
            "--gpu" if gpu else "--no-gpu",
            "--checkpoint-activations",
        ]
        assert (
            main(["plan", "--tokenizer", "bpe", "--bpe-vocab", "999", "--batch-size", "24", *words])
            == 0
        )
        assert (plan["world"], plan["half"], plan["fused"], plan["model"].vocab_size) == (
            8,
            gpu,
            gpu,
            1024,
        )
        assert plan["config"].train.batch_size == 24
        assert capsys.readouterr().out == "3.0 True\n"
    BPETokenizer.train([f"word{i} " for i in range(999)], 400).save(tmp_path)
    for asked, words in (
        (["bytes"], 320),
        ([tmp_path], 448),
        (["absent", "--vocab-size", "999"], 999),
    ):
        assert main(["plan", "--tokenizer", *map(str, asked)]) == 0
        assert plan["model"].vocab_size == words
    assert "no tokenizer at absent" in fails(capsys, "plan", "--tokenizer", "absent")

    report = called(report_module, "write_report", tmp_path)
    assert main(["report", "a", "b", "--out", "c.html"]) == 0
    assert report == {"folders": [Path("a"), Path("b")], "out": Path("c.html"), "models": []}
    matrix = called(matrix_module, "write_matrix", tmp_path)
    assert main(["matrix", "a", "--out", "c.html"]) == 0
    assert matrix == {"folders": [Path("a")], "out": Path("c.html"), "models": []}


def test_the_demo_preset_is_a_valid_comparison():
    config = check(Config(model=DEMO["model"], optim=DEMO["optim"], train=DEMO["train"]))
    assert config.train.steps > 0
    assert len(DEMO["seeds"]) >= 2
    assert DEMO["residuals"][0] == "standard"
