"""A residual from a package outside of the repository, by every way in, and the message where it is
missing."""

import json
import os
import shutil
import signal
import sys

import pytest
import torch
from outside import LEAKY, install, without_plugins, write_package
from tinyrun import tiny

from headwater.cli import main
from headwater.errors import Interrupted, UserError
from headwater.residuals import (
    StandardResidual,
    StreamResidual,
    build,
    names,
    pinned,
    register,
    registry,
)
from headwater.residuals.plugins import import_plugins
from headwater.runs.settings import asdict
from headwater.train import compare, train
from headwater.train.comparison import planned
from headwater.train.files import write_json
from headwater.train.jobs import Job, launch

SPEC, SAVED = "leaky:start=0.5", "leaky@brook.leaky:start=0.5"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of the package, not on the Python path; the current folder is another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with without_plugins():
        yield write_package(tmp_path)


def settings(folder):
    path = folder / "settings.json"
    rare = dict.fromkeys(("steps", "eval_every", "depth_every", "save_every"), 2)
    write_json(path, asdict(tiny(folder, **rare)))
    return ("--config", str(path))


def run(*argv) -> int:
    with without_plugins():
        return main([str(word) for word in argv])


def test_every_command_takes_it_from_a_module(site, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(site)  # the headwater command does not look here by itself
    out = tmp_path / "family"
    brook, spec = ("--plugin", "brook"), ("--residuals", SPEC, "--seeds", 0, "--out", out)
    assert run("compare", *settings(tmp_path), *spec, *brook) == 0
    (there,) = (out / "runs").glob("leaky_start=0.5-seed0-*")
    assert json.loads((there / "config.json").read_text())["model"]["residual"] == SAVED
    (checkpoint,) = (there / "checkpoints").iterdir()
    assert json.loads((checkpoint / "config.json").read_text())["residual"] == SAVED
    commands = {
        "generate": ("generate", there, "--max-new-tokens", 2),
        "report": ("report", out),
        "export": ("export", there, "--out", tmp_path / "exported"),
        "exported": ("generate", tmp_path / "exported", "--max-new-tokens", 2),
        "residuals": ("residuals", SPEC),
        "check": ("residuals", "--check", SPEC),
        "plan": ("plan", *settings(tmp_path), "--residual", SPEC, "--no-gpu"),
        "train": ("train", *settings(tmp_path), "--residual", SPEC, "--out", tmp_path / "alone"),
        "resume": ("train", "--resume", "--out", tmp_path / "alone"),
        "extend": ("compare", "--resume", "--out", out, "--residuals", SPEC, "--seeds", 0),
    }
    for name, argv in commands.items():
        assert run(*argv, *brook) == 0, (name, capsys.readouterr().err)
    page = (out / "report.html").read_text()
    assert "leaky:start=0.5" in page
    assert "@brook" not in page.partition("<script")[0].partition("<main")[2]
    capsys.readouterr()
    shutil.rmtree(tmp_path / "exported")
    # The same without it: one message that names it
    for name in ("generate", "export", "resume"):
        assert run(*commands[name]) == 1, name
        words = "'brook.leaky', which is not imported: add --plugin brook.leaky"
        assert words in capsys.readouterr().err
        assert "brook" not in sys.modules


RECIPE = """
[config]
model.size = "nano"
data.source = ["{source}"]
[[runs]]
"model.residual" = ["{spec}"]
"""


def test_a_study_takes_it(site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("headwater.train.studies.run_all", lambda *_, **__: {})
    (tmp_path / "short.txt").write_text("a short text, line by line\n" * 200)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(source=tmp_path / "short.txt", spec=SPEC))
    for plugin in (("--plugin", "brook.leaky"), ()):
        code = run("study", recipe, "--out", tmp_path / "study", *plugin)
        assert code == (0 if plugin else 1)


# What takes the place of a line of the guide's residual; the command that meets it; what it raises.
WRONG_SHAPE = ("* state[0] + y,)", "* state[0][..., :-1] + y[..., :-1],)")
WRONG_NAME = ("in range(sublayers)", "in range(layers)")
NO_NUMBER = ("* state[0] + y,)", "* float('nan') + y,)")
BROKEN = {
    "shape": (*WRONG_SHAPE, "train", RuntimeError, "normalized_shape"),
    "compare": (*WRONG_NAME, "compare", NameError, "'layers' is not defined"),
    "study": (*WRONG_NAME, "study", NameError, "'layers' is not defined"),
    "values": (*NO_NUMBER, "train", UserError, "not finite at step 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_broken_one_raises_is_followed_by_how_to_test_it(
    site, tmp_path, monkeypatch, capsys, case
):
    old, new, command, error, message = BROKEN[case]
    assert LEAKY.count(old) == 1
    (site / "brook" / "leaky.py").write_text(LEAKY.replace(old, new))
    monkeypatch.syspath_prepend(site)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[config.model]\nsize = "nano"\n[[runs]]\n"model.residual" = ["{SPEC}"]')
    words = {
        "train": (*settings(tmp_path), "--residual", SPEC),
        "compare": (*settings(tmp_path), "--residuals", SPEC),
        "study": (recipe,),
    }
    argv = (command, *words[command], "--out", tmp_path / "out", "--plugin", "brook")
    command = f"headwater residuals {SPEC} --check --plugin brook.leaky"
    advice = f"To test the residual by itself: {command}"
    if error is UserError:
        assert run(*argv) == 1
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.endswith(f", in another --out. {advice}\n")
    else:
        with pytest.raises(error, match=message) as raised:
            run(*argv)
        assert raised.value.__notes__ == [advice]


def test_of_headwater_s_own_nothing_is_to_be_tested(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.train.loop.begin", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        train(tiny(tmp_path), tmp_path / "out")
    assert not hasattr(raised.value, "__notes__")


def test_an_installed_package_needs_no_flag(site, tmp_path, monkeypatch):
    install(site)
    monkeypatch.syspath_prepend(site)
    assert [pinned(build(spec, 8, 4)) for spec in (SAVED, SPEC)] == [SAVED, SAVED]
    with without_plugins():
        assert "leaky" in names()


def test_an_installed_package_that_raises_is_named_with_its_line(site, monkeypatch):
    install(site)
    (site / "brook" / "__init__.py").write_text("import json\n1 / 0\n")
    monkeypatch.syspath_prepend(site)
    message = r"'brook = brook' of .*__init__.py, line 2: ZeroDivisionError: .*\n.* package brook"
    with pytest.raises(ValueError, match=message):
        build("leaky", 8, 4)


def test_from_python_an_import_is_enough(site, tmp_path, monkeypatch):
    """The processes of a comparison look where this one found the module."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    __import__("brook")
    started = []
    monkeypatch.setattr(
        "headwater.train.jobs.subprocess.Popen", lambda argv, **more: started.append((argv, more))
    )
    config = planned(tiny(tmp_path), SPEC, 0).config
    launch(Job(label="one", folder=tmp_path / "run", config=config), 1)
    ((argv, more),) = started
    assert argv[-2:] == ["--plugin", "brook.leaky"]
    assert more["env"]["PYTHONPATH"] == f"{site}{os.pathsep}elsewhere"


@pytest.mark.parametrize("plugin", [None, "brook.leaky"])
def test_runs_take_the_plugin_and_nothing_else_from_the_current_folder(site, monkeypatch, plugin):
    """A file called like a module of the standard library is not imported in its place."""
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(site)
    __import__("brook.leaky")
    for module in ("difflib", "colorsys", "random", "queue"):
        (site / f"{module}.py").write_text(f"open({str(site / 'ran')!r}, 'a').write({module!r})\n")
    config = tiny(site, residual=SPEC if plugin else "standard", source=("nowhere",))
    job = Job(label="one", folder=site / "runs" / "one", config=config)
    job.settings.parent.mkdir()
    write_json(job.settings, asdict(config))
    assert launch(job, 1).wait() == 1
    assert "no corpus at nowhere" in job.log.read_text()
    assert not (site / "ran").exists()


def test_a_file_that_names_a_module_imports_nothing(site, tmp_path, monkeypatch):
    (site / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(site)
    message = "registered by the module 'trap', which is not imported: add --plugin trap"
    with pytest.raises(ValueError, match=message):
        build("leaky@trap", 8, 4)


def test_another_module_s_residual_of_the_same_name_is_not_taken(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    __import__("brook")
    message = r"by 'creek' where it was saved, and is by 'brook.leaky.LeakyResidual' here"
    with pytest.raises(ValueError, match=message):
        build("leaky@creek", 8, 4)
    with pytest.raises(ValueError, match="defined in a script or notebook: define it there again"):
        build("quick@__main__", 8, 4)


def test_a_class_of_a_script_cannot_be_compared(site, tmp_path, monkeypatch):
    scope = {"__name__": "__main__"}
    exec(LEAKY, scope)
    with pytest.raises(UserError, match="cannot import: move it into a module of its own"):
        compare(tiny(tmp_path), tmp_path / "out", residuals=["leaky"], seeds=[0])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["brook.py", "./brook", "creek", "brook.creek"])
def test_a_plugin_that_there_is_not_is_named(site, monkeypatch, capsys, name):
    monkeypatch.chdir(site)
    assert run("residuals", "standard", "--plugin", name) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"headwater: --plugin {name} cannot be imported: ")
    assert "A plugin is the name of a module, in " in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # The module's line, not that of json
        ("import json\n\njson.loads('{')\n", "broken.py, line 3: JSONDecodeError: "),
        ("def half(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        (
            "\n" + LEAKY.replace('"leaky"', '"standard"'),
            "ValueError: residual 'standard' is registered already, by ",
        ),
    ],
)
def test_an_error_inside_of_a_plugin_names_its_line(site, monkeypatch, capsys, text, message):
    (site / "brook" / "broken.py").write_text(text)
    monkeypatch.chdir(site)
    assert run("residuals", "standard", "--plugin", "brook.broken") == 1
    assert message in capsys.readouterr().err
    with pytest.raises(UserError) as raised, without_plugins():
        import_plugins(["brook.broken"])
    # In Python the whole way is there.
    assert raised.value.__cause__ is not None


def test_register_refuses_what_would_not_work(site):
    class Mine(StreamResidual):
        def __init__(self, dim, sublayers, rate: float = 0.1):
            super().__init__(dim, sublayers)

        def _write(self, state, i, y):
            return (state[0] + y,)

    class Untyped(Mine):
        def __init__(self, dim, sublayers, *, rate=0.1):
            super().__init__(dim, sublayers)

    for name in ("", "My Own", "a:b", "a@b", "a,b", "../a"):
        with pytest.raises(ValueError, match="made of small letters"):
            register(name)
    for name, residual, message in (
        ("standard", Mine, "already, by headwater.residuals.standard.StandardResidual"),
        ("mine", Untyped, "option 'rate' of residual 'mine' needs a type, for example rate: float"),
    ):
        with pytest.raises(ValueError, match=message):
            register(name)(residual)
    assert "mine" not in registry._entries
    # A module that is loaded again registers its class again.
    assert register("mine")(Mine) is register("mine")(Mine)
    assert torch.equal(build("mine:rate=0.5", 4, 1).begin(torch.ones(4))[0], torch.ones(4))


def test_a_class_without_a_docstring_has_a_row_in_the_table(site, capsys):
    class Bare(StreamResidual):
        def _write(self, state, i, y):
            return (state[0] + y,)

    register("bare")(Bare)
    assert main(["residuals", "bare"]) == 0
    assert "bare" in capsys.readouterr().out


def test_an_interrupted_comparison_names_the_module_in_the_command_that_goes_on(
    site, tmp_path, monkeypatch
):
    """compare.json keeps residuals as they were written, so that without the flag nobody knows the name."""

    def interrupted(*_, go_on, **__):
        raise UserError(go_on)

    monkeypatch.setattr("headwater.train.studies.run_all", interrupted)
    register("elsewhere")(type("Elsewhere", (StandardResidual,), {"__module__": "elsewhere"}))
    with pytest.raises(UserError, match=r"--out \S+ --plugin elsewhere --resume"):
        compare(tiny(tmp_path), tmp_path / "out", residuals=["standard", "elsewhere"], seeds=[0])


def test_an_interrupted_run_names_its_module_too(site, tmp_path):
    sent = []

    def write(self, state, i, y):
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return StandardResidual._write(self, state, i, y)

    register("stopping")(
        type("Stopping", (StandardResidual,), {"__module__": "elsewhere", "_write": write})
    )
    with pytest.raises(Interrupted, match=r"headwater train --out \S+ --plugin elsewhere --resume"):
        train(tiny(tmp_path, residual="stopping"), tmp_path / "run")
