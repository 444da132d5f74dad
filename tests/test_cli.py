"""Every command from its words to what it does, what a flag overrides, and one line per mistake."""

import functools
import inspect
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tinyrun import changed, checkpoint_of, flags, tiny

import headwater
import headwater.generation.text_pieces
import headwater.train
from headwater.analyze import rates as rates_module
from headwater.analyze import report as report_module
from headwater.analyze import scaling as scaling_module
from headwater.analyze import scaling_report as scaling_report_module
from headwater.analyze import table as table_module
from headwater.analyze.scaling import Scaling
from headwater.cli import COMMANDS, main
from headwater.cli import training as training_module
from headwater.cli.flags import DEMO
from headwater.cli.parser import Parser
from headwater.errors import UserError
from headwater.generation.sampling import Sampling
from headwater.models import ModelConfig, decoder
from headwater.runs import record as runs_module
from headwater.runs.settings import Config
from headwater.train import studies as studies_module
from headwater.train import train
from headwater.train.checkpoint.folder import checkpoints, load_model
from headwater.train.data.tokenizer import BPETokenizer, ByteTokenizer
from headwater.train.distributed import plan as plan_module
from headwater.train.files import write_json

DONE = SimpleNamespace(bits_per_byte=1.0, steps=7)


def run(*argv) -> int:
    return main([str(word) for word in argv])


def fails(capsys, *argv) -> str:
    """The one message of a command that fails."""
    capsys.readouterr()
    assert run(*argv) != 0
    message = capsys.readouterr().err
    # A line on the text that was found may stand before the message.
    assert "headwater: " in message
    assert "Traceback" not in message
    return message.partition("headwater: ")[2]


@pytest.fixture
def called(monkeypatch):
    """Replace a function that a command calls; the result holds its last arguments by name."""

    def replace_with_note(module, name, result=None):
        calls, function = {}, getattr(module, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def note(*args, **kwargs):
            calls.clear()
            calls.update(signature.bind(*args, **kwargs).arguments)
            return result

        monkeypatch.setattr(module, name, note)
        return calls

    return replace_with_note


def python(*argv, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


# The command itself.


def test_help_names_every_command(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in COMMANDS)
    assert main(["help"]) == 0
    assert capsys.readouterr().out == output
    assert "did you mean 'compare'?" in fails(capsys, "compar")


def test_help_of_train_has_every_setting_with_text_and_default(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    output = " ".join(out.split()).replace(", --no-", " --no-")
    for section in asdict(Config()).values():
        for name in section:
            assert f"--{name.replace('_', '-')} " in output, name
    for line in (
        "--steps INT Number of updates of the weights. At least 1. (default: 500)",
        "--optimizer {adamw,muon} Optimizer. muon updates",
        "(default: on)",
    ):
        assert line in output
    assert re.search(r"\n  size +layers +dim .*\n  nano +4 +64 +4 +2 +176 +128\n", out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_sentences_that_stand_alone(capsys, monkeypatch, command):
    with pytest.raises(SystemExit) as caught:
        main(["help", command])
    assert caught.value.code == 0
    assert f"usage: headwater {command} " in capsys.readouterr().out
    parsers = []

    def stop(parser, words):
        parsers.append(parser)
        raise UserError("stop")

    monkeypatch.setattr(Parser, "parse_known_intermixed_args", stop)
    main([command])
    for action in parsers[0]._actions[1:]:  # without --help
        text = re.sub(r" \((required|default: .*)\)$", "", action.help, flags=re.DOTALL)
        assert re.match(r"(?!Of |What |Whether |How |Where |Which )[A-Z].*\.$", text), action.help
        assert "None" not in action.help


def test_version_and_python_m(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwater {headwater.__version__}\n"
    assert python("-m", "headwater", "-V").stdout == f"headwater {headwater.__version__}\n"


def test_bad_numbers_are_refused_before_torch_is_imported():
    program = "import sys; from headwater.cli import main\n"
    for words in ("train --steps 0", "compare --lr -1", "generate x --top-p 2"):
        program += f"assert main({words.split()!r}) == 1\n"
    output = python("-c", program + "assert 'torch' not in sys.modules")
    assert (output.returncode, output.stderr.count(" must ")) == (0, 3), output.stderr


HIDING = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""
BEGIN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["argparse", "torch"])
@pytest.mark.parametrize("name", ["headwater.__main__", "headwater"])  # the script, python -m
def test_ctrl_c_while_the_command_is_imported_is_a_line(tmp_path, module, name):
    """A library that takes the interruption for a package that is not installed does not hide it."""
    (tmp_path / f"{module}.py").write_text(HIDING)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = python("-c", BEGIN, name, "train", cwd=tmp_path, env=where)
    assert process.returncode == -signal.SIGINT
    assert process.stderr == "headwater: stopped by Ctrl-C\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_torchrun_starts_what_divides_its_work_and_nothing_else(capsys, monkeypatch, command):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(COMMANDS, command, print)
    assert main([command]) == 0  # a shell of a cluster
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if command in ("train", "generate"):
        assert main([command]) == 0
    else:
        assert "is the work of one process" in fails(capsys, command)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun with one process, too
    assert main([command]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--warmpu", "3"], "unknown flag --warmpu, did you mean --warmup?"),
        (["train", "--lerning-rate", "3"], "did you mean --lr?"),
        (["train", "--steps", "many"], "argument --steps: must be an integer; got 'many'"),
        (["train", "--steps", "0"], "--steps must be at least 1; got 0"),
        (["plan", "--size", "nanoo"], "--size must be a named size: did you mean 'nano'?"),
        (["train", "--config", "no.toml"], "no configuration file at no.toml"),
        (["compare", "--resume", "--out", "typo"], "there is no comparison at typo to resume"),
        (["compare", "--residual", "ddl"], "compare takes --residuals, not --residual"),
        (["generate", "nowhere"], "no checkpoint in"),
        (["report", "nowhere"], "is not a run, nor a folder of runs"),
        (["verify", "a"], "the following arguments are required: FOLDERS"),
        (["residuals", "st\x1b[31mandard"], r"unknown residual 'st\x1b[31mandard'. Did you mean"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_here_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device must be a device: " in fails(capsys, "inspect", "demo", "--device", "tpu9")
    words = "--device must be one that torch finds on this machine; got 'cuda'"
    assert words in fails(capsys, "generate", "demo", "--device", "cuda")


# From the words to the settings of a run.


def trained(called, *argv) -> dict:
    """The arguments with which `headwater train` calls the trainer."""
    arguments = called(headwater.train, "train", DONE)
    assert run("train", *argv) == 0
    return dict(arguments)


def test_defaults_then_file_then_flags(tmp_path, called):
    file = tmp_path / "run.toml"
    file.write_text('[optim]\nlr = 1\nwarmup = 7\n[model]\nqk_norm = true\nsize = "deep"\n')
    config = trained(called, "--config", file, "--warmup", "9", "--no-graph")["config"]
    assert (config.optim.lr, config.optim.warmup) == (1.0, 9)
    assert config.model == ModelConfig.named("deep", qk_norm=True)
    assert config.train == replace(Config().train, graph=False)
    # A size as a flag overrides the shape in a file.
    file.write_text("[model]\ndim = 16\nlayers = 2\nheads = 2\nqk_norm = true\n")
    for words in (["--mlp-dim", "32"], ["--mlp_dim=32"]):
        config = trained(called, "--config", file, "--size", "nano", *words)["config"]
        assert config.model == ModelConfig.named("nano", mlp_dim=32, qk_norm=True)


def test_a_list_takes_all_its_words_and_may_be_given_twice(called):
    config = trained(called, "--source", "a", "b", "--cuts", "2", "4", "--source", "c")["config"]
    assert (config.data.source, config.parallel.cuts) == (("a", "b", "c"), (2, 4))


def test_a_resumed_run_has_the_settings_that_it_began_with(tmp_path, monkeypatch, called):
    config = tiny(tmp_path, steps=7)
    write_json(tmp_path / "config.json", asdict(config))
    arguments = trained(called, "--out", tmp_path, "--resume", "--save-every", "3")
    settings = changed(config, save_every=3)
    assert arguments == {"config": settings, "out": tmp_path, "resume": True}
    assert trained(called, "--config", tmp_path)["config"] == config
    # A shell expands the tilde of `--out ~`, and leaves `--out=~` as it is.
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = trained(called, "--out=~", "--resume")
    assert (arguments["config"], arguments["out"]) == (config, tmp_path)


def test_a_resumed_comparison_has_the_residuals_and_seeds_that_it_began_with(tmp_path, called):
    config = tiny(tmp_path, steps=7)
    write_json(tmp_path / "settings.json", asdict(config))
    lists = {"residuals": ("standard", "rezero"), "seeds": (3, 5)}
    write_json(tmp_path / "compare.json", lists)
    arguments = called(headwater.train, "compare")
    resume = ["compare", "--out", tmp_path, "--resume"]
    assert run(*resume, "--jobs", "4") == 0
    assert arguments == {"config": config, "out": tmp_path, "jobs": 4, "resume": True, **lists}
    assert run(*resume, "--seeds", "8", "--arms", "ddl") == 0
    assert (arguments["seeds"], arguments["residuals"], arguments["jobs"]) == ((8,), ("ddl",), 1)


def test_the_demo_looks_at_the_pair_and_then_compares_with_the_plain_residual(
    tmp_path, called, capsys
):
    looked = called(training_module, "inspect")
    arguments = called(headwater.train, "compare")
    called(report_module, "write_report", Path("report.html"))
    assert run("demo", "--out", tmp_path / "demo", "--jobs", "1") == 0
    assert looked["argv"] == ["demo", "--out", str(tmp_path / "demo-pair.html")]
    assert arguments["residuals"][0] == "standard"
    assert arguments["config"] == DEMO["config"]
    # With two seeds hardly any difference is significant.
    assert len(arguments["seeds"]) >= 3
    assert "Seconds:" in capsys.readouterr().out


def test_the_pair_is_there_without_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = headwater.train.load_run("demo").model.config
    plain = headwater.train.load_run("demo/standard").model.config
    assert block.residual.startswith("attnres-block")
    assert replace(block, residual="standard") == plain
    assert run("inspect", "demo", "--removals", "none", "--prompt", "def f(") == 0
    assert "attnres-block" in Path("inspect.html").read_text()
    assert run("generate", "demo", "--prompt", "def ", "--max-new-tokens", "3") == 0
    assert "def " in capsys.readouterr().out
    # A folder of one's own goes first.
    Path("demo").mkdir()
    assert "no checkpoint in" in fails(capsys, "generate", "demo")


# Training, and what is done with a run.


def test_bad_input_ends_with_one_message_and_writes_no_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    base = flags(tiny(tmp_path), out)
    (tmp_path / "short.txt").write_text("brief " * 20)
    (tmp_path / "file").write_text("")
    for words, message in (
        (["--source", tmp_path / "absent"], "no corpus at"),
        (["--source", tmp_path / "short.txt", "--context", "512"], "shorter than the context"),
        (["--heads", "3"], "--heads must divide dim"),
        (["--residual", "attnres"], "Valid names"),
        (["--vocab-size", "100"], "--vocab-size must be at least 257"),
        (["--device", "tpu9"], "device 'tpu9'"),
        (["--out", tmp_path / "file" / "run"], "Not a directory"),
    ):
        assert message in fails(capsys, *base, *words)
    assert not checkpoints(out / "checkpoints")
    assert main(base) == 0  # the folder is still good for a run


def test_an_exploding_run_ends_with_one_message(tmp_path, capsys):
    exploding = ["--lr", "1e30", "--warmup", "0"]
    message = fails(capsys, *flags(tiny(tmp_path), tmp_path / "run"), *exploding)
    assert "the loss or gradient is not finite at step" in message
    assert "lower --lr" in message
    often = ["--eval-every", "1", "--save-every", "1"]
    message = fails(capsys, *flags(tiny(tmp_path), tmp_path / "two"), *exploding, *often)
    assert "the validation loss is not finite after step 1. There is no good checkpoint." in message
    assert (tmp_path / "two" / "diverged.json").exists()


def test_a_checkpoint_to_resume_is_answered_with_its_run(run_folder, capsys):
    checkpoint = checkpoint_of(run_folder)
    message = fails(capsys, "train", "--resume", "--out", checkpoint)
    assert f"Resume its run with --out {run_folder}" in message
    assert f"--init-from {checkpoint}" in message


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_nothing_is_written_into_a_folder_that_holds_something_else(tmp_path, run_folder, capsys):
    notes, llama = tmp_path / "notes", tmp_path / "llama"
    for folder, name, text in (
        (notes, "diary.md", "mine"),
        (llama, "config.json", '{"model_type": "llama"}'),
    ):
        folder.mkdir()
        (folder / name).write_text(text)
    config = tiny(tmp_path, steps=2)
    command, *settings, _, _ = flags(config, tmp_path / "new")
    before = snapshot(tmp_path)
    for out in (checkpoint_of(run_folder), notes, llama):
        for words in (
            ["export", run_folder],
            [command, *settings],
            ["compare", *settings, "--seeds", "0"],
        ):
            assert "holds something else (" in fails(capsys, *words, "--out", out)
    with pytest.raises(UserError, match="holds something else"):
        train(config, llama, resume=True)
    assert snapshot(tmp_path) == before


def test_a_run_begins_beside_logs_and_leaves_what_a_link_leads_to_alone(tmp_path, capsys):
    folder, precious = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    for name in ("log.txt", "nohup.out", "mine.log", ".DS_Store"):
        (folder / name).write_text("")
    precious.write_text("precious")
    (folder / ".lock").symlink_to(precious)
    words = flags(tiny(tmp_path, steps=2), folder)
    assert f"{folder}/.lock" in fails(capsys, *words)
    assert precious.read_text() == "precious"
    (folder / ".lock").unlink()
    assert main(words) == 0


def test_an_export_to_a_full_disk_leaves_nothing_and_a_second_one_works(
    tmp_path, finished, capsys, monkeypatch
):
    out = tmp_path / "exported"

    def full(tensors, path):
        path.write_bytes(b"the first ten")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "save_file", full)
        message = fails(capsys, "export", finished, "--out", out)
        assert message == f"No space left on device: {out}\n"
    assert not list(tmp_path.iterdir())
    out.mkdir()
    (out / "log.txt").write_text("mine")
    assert run("export", finished, "--out", out) == 0
    files = {"SHA256SUMS", "config.json", "log.txt", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == files


def test_kernels_by_name_on_a_cpu_are_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = flags(tiny(tmp_path, residual="attnres-full:backend=triton"), tmp_path / "run")
    message = fails(capsys, *words)
    assert "the kernels need cuda" in message or "triton is not installed" in message


def test_generate_and_report_from_a_run(tmp_path, run_folder, capsys):
    prompt = ["--prompt", "river ", "--temperature", "0", "--max-new-tokens"]
    saved, texts = tmp_path / "saved", []
    model, tokenizer = load_model(run_folder)
    model.save(saved)
    assert "tokenizer.json" in fails(capsys, "generate", saved, *prompt, "12")
    tokenizer.save(saved)
    for folder in (run_folder, checkpoint_of(run_folder), saved):
        assert run("generate", folder, *prompt, "12") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("river ")
    assert texts == [texts[0]] * 3
    assert "100 new ones exceed" in fails(capsys, "generate", run_folder, *prompt, "100")
    assert run("report", run_folder) == 0
    assert str(run_folder / "report.html") in capsys.readouterr().out


def test_every_flag_of_generate_reaches_the_sampler(tmp_path, capsys, monkeypatch, called):
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(
        headwater.train,
        "load_run",
        lambda _, device: SimpleNamespace(model=device, tokenizer=tokenizer),
    )
    arguments = called(headwater.generation.text_pieces, "continue_texts", [["x", "y"], ["", "z"]])
    drawn = {"temperature": 0.3, "top_k": 5, "top_p": 0.25, "min_p": 0.125}
    drawn["repetition_penalty"] = 1.5
    others = {"max_new_tokens": 7, "seed": 11, "prefill_chunk": 3}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**drawn, **others}.items()]
    prompts = ["generate", tmp_path, "--prompt", "ab", "cd"]
    assert run(*prompts, "--stop", "end", "stop", *words) == 0
    expected = {"model": "cpu", "tokenizer": tokenizer, "prompts": ["ab", "cd"], **others}
    assert arguments == {**expected, "sampling": Sampling(**drawn), "stops": ("end", "stop")}
    output = capsys.readouterr()
    assert output.out == "[ab] x\n[cd] yz\n"
    assert "2 tokens of each of 2 texts in " in output.err
    assert "--stream shows one text" in fails(capsys, *prompts, "--stream")


def test_a_text_is_streamed_and_ctrl_c_leaves_the_line(tmp_path, capsys, monkeypatch):
    loaded = SimpleNamespace(model="a model", tokenizer=ByteTokenizer())
    monkeypatch.setattr(headwater.train, "load_run", lambda *_: loaded)

    def pieces(*_, **__):
        yield ["one "]
        yield ["two\x1b[2J"]  # a terminal does not obey what a model writes
        raise KeyboardInterrupt

    monkeypatch.setattr(headwater.generation.text_pieces, "continue_texts", pieces)
    assert run("generate", tmp_path, "--prompt", "zero ", "--stream") == 130
    output = capsys.readouterr()
    assert output.out == "zero one two\\x1b[2J\n"
    assert output.err == "headwater: stopped by Ctrl-C after 2 tokens\n"


# Commands that look.


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (40, ["hyper-connections:streams=2,form=static"]),
        (80, ["standard", "mhc", "hyper-connections"]),
    ],
)
def test_narrow_terminals_keep_names_and_numbers(capsys, monkeypatch, width, names):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["residuals", *names]) == 0
    output = capsys.readouterr().out.partition("traffic: passes")[0]
    lines = output.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in output
    assert all(name in output.replace("\n", "").replace(" ", "") for name in names)
    assert "eager" in output
    rows = [line.split() for line in lines if line.split()[:1] in ([name] for name in names)]
    assert [len(row) for row in rows] == [7] * (3 if width == 80 else 0), "beside each other"


def test_a_named_residual_shows_its_options(capsys):
    assert main(["residuals", "attnres-block:block=2"]) == 0
    output = capsys.readouterr().out
    assert "block=none  a whole number or none" in output
    assert "At initialisation: queries are zero" in output
    assert main(["residuals", "highway", "attnres-block:block=2", "--markdown"]) == 0
    output = capsys.readouterr().out
    assert "| `highway` |" in output
    assert "| `attnres-block:block=2` |" in output


STUDIED = SimpleNamespace(folder=Path("my study"), finished={"a": 1})
CALLS = [
    (
        "residuals ddl rezero --dim 32 --layers 3",
        (table_module, "residual_table", []),
        {"specs": ("ddl", "rezero"), "dim": 32, "layers": 3},
    ),
    (
        "report a b --out c.html",
        (report_module, "write_report", Path("c.html")),
        {"folders": [Path("a"), Path("b")], "out": Path("c.html"), "models": []},
    ),
    (
        "study a.toml --out b --minutes 3 --whole",
        (studies_module, "study", STUDIED),
        {"recipe": Path("a.toml"), "out": Path("b"), "minutes": 3.0, "whole": True},
    ),
]


@pytest.mark.parametrize(("words", "function", "expected"), CALLS)
def test_flags_reach_the_function_of_a_command(called, monkeypatch, words, function, expected):
    arguments = called(*function)
    monkeypatch.setattr(table_module, "print_table", lambda rows: None)
    assert main(words.split()) == 0
    assert arguments == expected


def test_flags_of_scaling_reach_the_fit(tmp_path, capsys, called):
    read, rated = called(runs_module, "read_runs", []), called(rates_module, "at_rate", [])
    plot = called(scaling_report_module, "write_plot", tmp_path)
    fit = called(scaling_module, "compare_scaling", [])
    assert main(["scaling", "a", "b", "--baseline", "rezero"]) == 0
    assert (read["folders"], rated["lr"]) == ([Path("a"), Path("b")], None)
    assert (fit["baseline"], plot["path"]) == ("rezero", Path("a/scaling.svg"))
    for rate, lr in (("best", "best"), ("6e-3", 0.006)):
        assert main(["scaling", "a", "--lr", rate, "--out", "c.svg", "--plugin", "json"]) == 0
        assert (rated["lr"], plot["path"]) == (lr, Path("c.svg"))
        assert ("Learning rates, by operations" in capsys.readouterr().out) == (lr == "best")


def test_scaling_names_runs_that_it_leaves_out_and_settings_that_differ(
    capsys, called, monkeypatch
):
    losses = [None, 1.0, None, 1.0]
    runs = [SimpleNamespace(summary={"bits_per_byte": x}, extended=False) for x in losses]
    runs[0].summary = None
    called(runs_module, "read_runs", runs)
    called(rates_module, "at_rate", runs)
    called(rates_module, "rates_by_budget", "")
    called(scaling_module, "points_of", {})
    called(scaling_report_module, "write_plot")
    apart = {"a": ("optim.lr",), "b": ("optim.clip", "optim.lr")}
    monkeypatch.setattr(scaling_module, "confounders_of", lambda runs, baseline: apart)
    called(scaling_module, "compare_scaling", [Scaling(name, {}, None, None, {}) for name in apart])
    assert main(["scaling", "a"]) == 0
    output = capsys.readouterr().out
    assert "Left out, as they have not finished or diverged: 2 of 4 runs\n" in output
    assert "a in optim.lr; b in optim.clip, optim.lr\n" in output
    assert main(["scaling", "a", "--lr", "best"]) == 0
    assert "explain a part of it too: b in optim.clip\n" in capsys.readouterr().out


def test_flags_of_plan_reach_it(tmp_path, capsys, called):
    plan = called(plan_module, "make_plan")
    description = called(plan_module, "describe", "the plan")
    words = "--tokenizer bpe --bpe-vocab 999 --batch-size 24 --world 8 --memory 3"
    for flag, gpu in (("--gpu", True), ("--no-gpu", False)):
        assert main(["plan", *words.split(), flag, "--checkpoint-activations"]) == 0
        assert (plan["world"], plan["half"], plan["fused"]) == (8, gpu, gpu)
        assert (plan["model"].vocab_size, plan["config"].train.batch_size) == (1024, 24)
        assert list(description.values())[1:] == [3.0, True]
    BPETokenizer.train([f"word{i} " for i in range(999)], 400).save(tmp_path)
    for words, size in (
        (["bytes"], 320),
        ([tmp_path], 448),
        (["absent", "--vocab-size", "999"], 999),
    ):
        assert run("plan", "--tokenizer", *words) == 0
        assert plan["model"].vocab_size == size
    write_json(tmp_path / "config.json", asdict(tiny(tmp_path)))
    assert run("plan", tmp_path / "config.json", "--size", "nano", "--layers", "1") == 0
    assert (plan["model"].dim, plan["model"].layers) == (64, 1)
