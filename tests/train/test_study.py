"""A study: what a recipe describes, run once, in pieces if need be."""

import json
import math
import os
import shlex
import shutil
import signal
import time
from dataclasses import replace

import pytest
from outside import without_plugins
from processes import Forked
from tinyrun import tiny, write_corpus

from headwater.cli import main
from headwater.errors import Interrupted, UserError
from headwater.residuals import StandardResidual, register
from headwater.train import StudyResult, load_file, study
from headwater.train.comparison import compare
from headwater.train.config import Config
from headwater.train.data.dataset import prepare
from headwater.train.files import read_json, write_json
from headwater.train.loop import train
from headwater.train.recipes import read_recipe, steps_for
from headwater.train.studies import describe, operations, settings_of

RECIPE = """
name = "pair"
jobs = 2

[config.model]
size = "nano"
dim = 16
layers = 2
heads = 2
kv_heads = 1
mlp_dim = 32
context = 32
[config.data]
source = ["{corpus}"]
cache = "{cache}"
validation = 0.1
[config.train]
steps = 4
batch_size = 4
eval_windows = 8
device = "cpu"

[[runs]]
"model.residual" = ["standard", "attnres-block:block=2"]
"train.seed" = [0]
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(corpus=write_corpus(tmp_path), cache=tmp_path / "cache"))
    return path


def test_a_recipe_is_the_product_of_its_lists(recipe):
    text = (
        recipe.read_text().replace("[0]", "[0, 1]")
        + '\n[[runs]]\n"optim.lr" = [0.1, 1]\ntokens_per_parameter = 20\n'
    )
    recipe.write_text(text)
    plan = read_recipe(recipe)
    assert list(plan.runs) == [  # one seed of all before the next
        "residual-standard-seed-0",
        "residual-attnres-block_block=2-seed-0",
        "lr-0.1-tokens_per_parameter-20",
        "lr-1-tokens_per_parameter-20",
        "residual-standard-seed-1",
        "residual-attnres-block_block=2-seed-1",
    ]
    first, last = (
        plan.runs["residual-attnres-block_block=2-seed-1"],
        plan.runs["lr-1-tokens_per_parameter-20"],
    )
    assert (first.model.residual, first.train.seed, first.train.steps) == (
        "attnres-block:block=2",
        1,
        4,
    )
    inner = 2 * (16 * 16 * 3 + 3 * 16 * 32 + 2 * 16) + 16  # two layers, and the final norm
    assert (last.optim.lr, last.train.steps) == (1.0, -(-20 * inner // (4 * 32)))
    assert (plan.jobs, plan.keep_weights) == (2, False)


def test_all_residuals_of_a_size_see_the_same_tokens(recipe):
    recipe.write_text(
        recipe.read_text()
        + '\n[[runs]]\n"model.residual" = ["standard", "mhc"]\ntokens_per_parameter = 20\n'
    )
    runs = read_recipe(recipe).runs
    steps = {
        runs[f"residual-{name}-tokens_per_parameter-20"].train.steps for name in ("standard", "mhc")
    }
    assert len(steps) == 1


def test_a_run_that_two_tables_describe_is_one(recipe):
    """In another order, or with a setting that the file's own configuration has: a repetition would count as a seed."""
    overlapping = (
        '\n[[runs]]\n"train.seed" = [0, 1]\n"model.residual" = "standard"\n"train.steps" = 4\n'
    )
    recipe.write_text(recipe.read_text() + overlapping)
    plan = read_recipe(recipe)
    assert [(config.model.residual, config.train.seed) for config in plan.runs.values()] == [
        ("standard", 0),
        ("attnres-block:block=2", 0),
        ("standard", 1),
    ]


def test_two_runs_that_would_share_a_folder_are_refused(recipe):
    recipe.write_text(
        recipe.read_text() + "\n[[runs]]\n'data.source' = [['a/b.txt'], ['a_b.txt']]\n"
    )
    with pytest.raises(
        UserError, match=r"share the folder source-_a_b.txt_:\n  data.source: \['a/b.txt'\] there"
    ):
        read_recipe(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 1", "unknown key 'nmae'; did you mean 'name'"),
        ("name = 'x'", r"needs at least one table \[\[runs\]\]"),
        (
            "plugins = ['mine']",
            "unknown key 'plugins'; a module .* is named to the command: --plugin MODULE",
        ),
        (
            "[model]\nlayers = 2",
            r"unknown key 'model'; what all runs share stands under \[config.model\]",
        ),
        (
            "seeds = [0]",
            r"""unknown key 'seeds'; seed stands under \[config.train\], or as "train.seed" under \[\[runs""",
        ),
        ("[[runs]]\nlr = [1.0]", """'lr' must name its section, such as "optim.lr"; or be"""),
        ("[[runs]]\nseeds = [0]", """'seeds' must name its section, such as "train.seed"; or be"""),
        (
            "[[runs]]\nresiduals = ['ddl']",
            """'residuals' must name its section, such as "model.residual"; or be""",
        ),
        ("[[runs]]\nwhat = [0]", """'what' must name its section, as "optim.lr" does; or be"""),
        (
            "[config.train]\nsteps = [2, 4]\n[[runs]]\n'optim.lr' = 1.0",
            r'config: train: steps is one value .* with each, write "train.steps" = \[2, 4\] under \[\[runs\]\]$',
        ),
        (
            "[config.train]\nstpes = [2]\n[[runs]]\n'optim.lr' = 1.0",
            "unknown key 'stpes'; did you mean 'steps'",
        ),
        (
            "[[runs]]\noptim.lr = [1.0]",
            'write the section and the setting in quotes: "optim.lr" = ',
        ),
        ("[[runs]]\n'optim.lr' = []", "the list of optim.lr is empty"),
        (
            "[[runs]]\ntokens_per_parameter = 'many'",
            "tokens_per_parameter must be a number above zero; got 'many'",
        ),
        (
            "[[runs]]\ntokens_per_parameter = [-1]",
            "tokens_per_parameter must be a number above zero; got -1",
        ),
        (
            "[[runs]]\ntokens_per_parameter = inf",
            "tokens_per_parameter must be a number above zero; got inf",
        ),
        (
            "[[runs]]\ntokens_per_parameter = 2\n'train.steps' = [3]",
            'and so does "train.steps": give one$',
        ),
        ("[runs]\n'optim.lr' = 1.0", r"write \[\[runs\]\], .* instead of \[runs\]$"),
        ("runs = [1, 2]", r"needs at least one table \[\[runs\]\]"),
        ("name = ['x']\n[[runs]]\n'optim.lr' = 1.0", r"name must be a word, .*; got \['x'\]"),
        ("[[runs]]\n'optim.rate' = [1.0]", "unknown key 'rate'"),
        (
            "[[runs]]\n'data.source' = ['a', 'b']",
            r"""runs: "data.source" is a list itself: write \[\['a'\], \['b'\]\] for a run with each, """
            r"or \[\['a', 'b'\]\] for all of them in one run$",
        ),
        ("[[runs]]\n'data.source' = 'a'", r"is a list itself: write \[\['a'\]\]$"),
        (
            "[[runs]]\n'parallel.cuts' = [2, 4]",
            r"""runs: "parallel.cuts" is a list itself: write \[\[2\], \[4\]\]""",
        ),
        ("[[runs]]\n'optim.lr' = ['fast']", "lr must be a number; got 'fast'"),
        ("jobs = 0\n[[runs]]\n'optim.lr' = 1.0", "jobs must be a whole number from 1"),
        (
            "jobs = 1.5\n[[runs]]\n'optim.lr' = 1.0",
            "jobs must be a whole number from 1, .*; got 1.5, False",
        ),
        ("[[runs]", "cannot read the recipe"),
    ],
)
def test_a_recipe_that_does_not_fit_says_what_does(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_recipe(tmp_path / "recipe.toml")
    with pytest.raises(UserError, match="no recipe at"):
        read_recipe(tmp_path / "none.toml")


@pytest.mark.slow
def test_a_study_runs_what_is_missing_and_nothing_twice(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
    out = tmp_path / "study"
    nothing = study(recipe, out, minutes=0)
    assert (len(nothing.finished), len(nothing.left), nothing.seconds) == (0, 2, None)
    assert not any(out.glob("runs/*/config.json"))
    assert json.loads((out / "table.json").read_text()) == []
    done = study(recipe, out)
    assert (len(done.finished), done.left) == (2, ())
    assert "2 of 2 runs finished" in capsys.readouterr().out
    files = {path.name for path in (out / "runs" / "residual-standard-seed-0").iterdir()}
    assert {"metrics.jsonl", "config.json", "summary.json"} <= files
    assert "checkpoints" not in files
    rows = json.loads((out / "table.json").read_text())
    assert rows == json.loads(json.dumps(done.table()))
    assert [(row["run"], row["model"]["residual"], row["bits_per_byte"]) for row in rows] == [
        (name, run.residual, run.bits_per_byte) for name, run in done.finished.items()
    ]
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    assert study(recipe, out).finished.keys() == done.finished.keys()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 5"))
    with pytest.raises(
        UserError, match=r"other settings, or on other text:\n  train.steps: 4 there, 5 asked for"
    ):
        study(recipe, out)
    recipe.write_text(
        recipe.read_text().replace("steps = 5", "steps = 4").replace("mlp_dim = 32", "mlp_dim = 48")
    )
    with pytest.raises(UserError, match=r"model.mlp_dim: 32 there, 48 asked for"):
        study(recipe, out)
    assert (
        json.loads((out / "settings" / "residual-standard-seed-0.json").read_text())["train"][
            "steps"
        ]
        == 4
    )
    assert tiny(tmp_path).train.steps != 4, "the recipe's own settings were used"


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_weights_go_when_their_run_is_finished_not_when_the_study_is(
    recipe, tmp_path, monkeypatch, keep
):
    """Those of a long study fill a disk, and an interrupted one must not leave them."""
    out, there = tmp_path / "study", []

    class Watched(Forked):
        def __init__(self, *arguments, **options):
            there.append(sorted(path.parent.name for path in out.glob("runs/*/checkpoints")))
            super().__init__(*arguments, **options)

    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Watched)
    recipe.write_text(
        recipe.read_text().replace("jobs = 2", f"jobs = 1\nkeep_weights = {str(keep).lower()}")
    )
    study(recipe, out)
    assert there == [[], ["residual-standard-seed-0"] if keep else []]
    assert len([*out.glob("runs/*/checkpoints")]) == 2 * keep
    left = out / "runs" / "residual-standard-seed-0" / "checkpoints"  # by a call that was killed
    left.mkdir(exist_ok=True)
    study(recipe, out)
    assert left.exists() == keep


def begin_by_hand(recipe, out, name, *, upto=None):
    """A run of the recipe in its place, as a study leaves it: finished, or cut off after a step."""
    config = read_recipe(recipe).runs[name]
    folder = out / "runs" / name
    train(replace(config, train=replace(config.train, save_every=2)), folder, progress=False)
    if upto is not None:
        (folder / "summary.json").unlink()
        for late in sorted((folder / "checkpoints").glob("step-*"))[upto // 2 :]:
            shutil.rmtree(late)
    return folder


def test_a_run_that_was_cut_off_does_not_go_on_to_other_steps(recipe, tmp_path):
    """Its learning rate would follow no single schedule, and its result stand beside runs that do."""
    begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0", upto=2)
    assert len(study(recipe, tmp_path / "study", minutes=0).left) == 2
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 8"))
    with pytest.raises(
        UserError, match=r"other settings, or on other text:\n  train.steps: 4 there, 8 asked for"
    ):
        study(recipe, tmp_path / "study", minutes=0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("mlp_dim = 32\n", "", r"model.mlp_dim: 32 there, \d+ asked for"),
        ('size = "nano"', 'size = "ladder-2m"', r"model.context"),
    ],
)
def test_a_size_that_changes_the_model_is_noticed(recipe, tmp_path, old, new, told):
    """What a run spells out comes from its size, where the recipe says nothing else."""
    if "size" in old:
        text = recipe.read_text().replace("context = 32\n", "")
        recipe.write_text(
            text.replace("validation = 0.1", "validation = 0.5")
        )  # for the longer context too
    begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0")
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"other settings, or on other text:\n  {told}"):
        study(recipe, tmp_path / "study", minutes=0)


@pytest.mark.parametrize("upto", [2, None])
def test_a_run_keeps_its_folder_when_the_recipes_lists_change(recipe, tmp_path, upto):
    """Else it would be made again under another name, and a fit have two runs of one seed."""
    out, name = tmp_path / "study", "residual-standard-seed-0"
    begin_by_hand(recipe, out, name, upto=upto)
    seeds = f'"optim.lr" = [1e-2, {Config().optim.lr}]\n"train.seed" = [0, 1]'
    recipe.write_text(recipe.read_text().replace('"train.seed" = [0]', seeds))
    result = study(recipe, out, minutes=0)
    names = {*result.finished, *result.left}
    assert len(names) == 8
    assert name in (result.left if upto else result.finished)
    assert (
        names
        == {path.stem for path in (out / "settings").iterdir()}
        == read_json(out / "corpora.json").keys()
    )
    assert f"residual-standard-lr-{Config().optim.lr}-seed-0" not in names
    assert set(study(recipe, out, minutes=0).left) == set(result.left)


@pytest.mark.parametrize("residual", ["standard", "attnres-block:block=2"])
def test_a_factor_on_the_rate_of_no_queries_moves_no_folder(recipe, tmp_path, residual):
    """Its default was another once."""
    name = f"residual-{residual.replace(':', '_')}-seed-0"
    folder = begin_by_hand(recipe, tmp_path / "study", name)
    config = read_json(folder / "config.json")
    config["optim"]["query_lr"] = 1.0
    write_json(folder / "config.json", config)
    recipe.write_text(
        recipe.read_text().replace('"train.seed" = [0]', '"train.seed" = [0]\n"train.steps" = [4]')
    )
    assert [*study(recipe, tmp_path / "study", minutes=0).finished] == (
        [name] if residual == "standard" else []
    )


def test_runs_that_differ_in_what_they_log_alone_have_a_folder_each(recipe, tmp_path):
    """Only one of them can be the one that is there."""
    out, name = tmp_path / "study", "residual-standard-seed-0"
    begin_by_hand(recipe, out, name)
    logged = '"train.seed" = [0]\n"train.log_every" = [10, 20]'
    recipe.write_text(recipe.read_text().replace('"train.seed" = [0]', logged))
    result = study(recipe, out, minutes=0)
    assert [*result.finished] == [name]
    assert len(result.left) == 3


def test_a_run_that_keeps_its_folder_is_given_settings_that_are_there(
    recipe, tmp_path, monkeypatch
):
    out, name, given = tmp_path / "study", "residual-standard-seed-0", {}
    begin_by_hand(recipe, out, name, upto=2)
    recipe.write_text(
        recipe.read_text().replace('"train.seed" = [0]', '"train.seed" = [0]\n"train.steps" = [4]')
    )
    monkeypatch.setattr(
        "headwater.train.studies.run_all",
        lambda jobs, *_, **__: (
            given.update({job.label: load_file(job.arguments[1]) for job in jobs}) or {}
        ),
    )
    study(recipe, out)
    assert name in given
    assert sorted(config.model.residual for config in given.values()) == [
        "attnres-block:block=2",
        "standard",
    ]
    assert given[name].model.residual == "standard"


def test_folders_of_no_run_of_the_file_are_named(recipe, tmp_path, capsys):
    """Such as those of settings that have changed together with the lists: reports and fits would take them too."""
    out, name = tmp_path / "study", "residual-standard-seed-0"
    begin_by_hand(recipe, out, name)
    for foreign, text in (("another", "[1]"), ("damaged", "{")):
        (out / "runs" / foreign).mkdir()
        (out / "runs" / foreign / "config.json").write_text(text)
    recipe.write_text(
        recipe.read_text()
        .replace("steps = 4", "steps = 5")
        .replace("[0]", '[0]\n"optim.lr" = [1e-3]')
    )
    capsys.readouterr()
    assert len(study(recipe, out, minutes=0).left) == 2
    assert (
        f"of no run of this file: another, {name}, in {out / 'runs'}\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize("upto", [2, None])
def test_text_that_has_changed_is_noticed(recipe, tmp_path, upto):
    """Under the same name: runs before and after would not have seen equal tokens."""
    out = tmp_path / "study"
    begin_by_hand(recipe, out, "residual-standard-seed-0", upto=upto)
    study(recipe, out, minutes=0)
    (tmp_path / "corpus" / "0.txt").write_text("another river")
    with pytest.raises(
        UserError, match=r"on other text:\n  corpus.source_hash: .* there, .* asked for"
    ):
        study(recipe, out, minutes=0)
    write_corpus(tmp_path)
    assert len(study(recipe, out, minutes=0).left) == (1 if upto is None else 2)


def test_runs_count_where_their_text_lies_now(recipe, tmp_path):
    """If it is known to be the same: an archive may not say how it was tokenised."""
    out = tmp_path / "study"
    begin_by_hand(recipe, out, "residual-standard-seed-0")
    study(recipe, out, minutes=0)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    recipe.write_text(recipe.read_text().replace(str(tmp_path / "corpus"), str(tmp_path / "moved")))
    assert len(study(recipe, out, minutes=0).finished) == 1
    text = recipe.read_text()
    recipe.write_text(text + '"train.batch_size" = [4]\n')  # which its names have, and which it had
    assert len(study(recipe, out, minutes=0).finished) == 1
    recipe.write_text(text)
    (out / "corpora.json").unlink()
    with pytest.raises(
        UserError, match=r"on other text:\n  data.source: .*corpus.* there, .*moved.* asked for"
    ):
        study(recipe, out, minutes=0)


@pytest.mark.parametrize("there", ["compare.json", "metrics.jsonl", "a text.txt"])
def test_a_study_begins_in_a_folder_of_its_own(recipe, tmp_path, there):
    """In one of a comparison or a run it would write over their table, and reports would mix them."""
    (tmp_path / "study" / "runs").mkdir(parents=True)
    (tmp_path / "study" / there).write_text("{}")
    with pytest.raises(
        UserError, match=rf"holds something else \({there}\), and a study needs a folder of its own"
    ):
        study(recipe, tmp_path / "study", minutes=0)
    (tmp_path / "study" / there).unlink()
    study(recipe, tmp_path / "study", minutes=0)
    run = tmp_path / "study" / "runs" / "residual-standard-seed-0"
    run.mkdir()
    write_json(run / "config.json", {})
    for page in (
        "report.html",
        "notes.txt",
    ):  # beside runs, as where an archive of them is unpacked
        (tmp_path / "study" / page).write_text("")
    assert len(study(recipe, tmp_path / "study", minutes=0).left) == 2
    (tmp_path / "study" / "compare.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds something else \(compare.json, "):
        study(recipe, tmp_path / "study", minutes=0)


def test_text_that_has_changed_is_noticed_in_an_archive_too(recipe, tmp_path):
    """Which holds runs alone: what they saw is then in their summaries."""
    folder = begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0")
    assert len(study(recipe, tmp_path / "study", minutes=0).finished) == 1
    (tmp_path / "study" / "corpora.json").unlink()
    (tmp_path / "corpus" / "0.txt").write_text("another river")
    with pytest.raises(
        UserError, match=r"on other text:\n  corpus.source_hash: .* there, .* asked for"
    ):
        study(recipe, tmp_path / "study", minutes=0)
    summary = read_json(folder / "summary.json")
    write_json(
        folder / "summary.json",
        {key: value for key, value in summary.items() if key != "source_hash"},
    )
    assert (
        len(study(recipe, tmp_path / "study", minutes=0).finished) == 1
    )  # of before summaries had it


def test_a_finished_run_of_a_residual_from_elsewhere_counts(recipe, tmp_path):
    with without_plugins():
        register("from-elsewhere")(
            type("Elsewhere", (StandardResidual,), {"__module__": "elsewhere"})
        )
        recipe.write_text(recipe.read_text().replace('"attnres-block:block=2"', '"from-elsewhere"'))
        folder = begin_by_hand(recipe, tmp_path / "study", "residual-from-elsewhere-seed-0")
        assert (
            json.loads((folder / "config.json").read_text())["model"]["residual"]
            == "from-elsewhere@elsewhere"
        )
        assert list(study(recipe, tmp_path / "study", minutes=0).finished) == [
            "residual-from-elsewhere-seed-0"
        ]


def test_a_class_that_has_changed_since_is_looked_at_again(recipe):
    """As in a notebook, whose cell registers it anew between two calls."""
    recipe.write_text(recipe.read_text().replace('"attnres-block:block=2"', '"from-elsewhere"'))
    work = []
    for flops in (10, 1000):
        with without_plugins():
            body = {"__module__": "elsewhere", "flops_per_token": lambda self, flops=flops: flops}
            register("from-elsewhere")(type("Elsewhere", (StandardResidual,), body))
            work.append(operations(read_recipe(recipe).runs["residual-from-elsewhere-seed-0"]))
    assert work[0] < work[1]


def test_the_factor_of_queries_counts_where_there_are_some(recipe, tmp_path):
    """Runs of before its default changed are those that a recipe asks for, if they have no queries."""
    recipe.write_text(
        recipe.read_text().replace(
            "[config.train]", "[config.optim]\nquery_lr = 1.0\n[config.train]"
        )
    )
    out = tmp_path / "study"
    begin_by_hand(recipe, out, "residual-standard-seed-0")
    recipe.write_text(recipe.read_text().replace("query_lr = 1.0", "query_lr = 0.1"))
    assert list(study(recipe, out, minutes=0).finished) == ["residual-standard-seed-0"]
    begin_by_hand(recipe, out, "residual-attnres-block_block=2-seed-0")
    recipe.write_text(recipe.read_text().replace("query_lr = 0.1", "query_lr = 0.2"))
    with pytest.raises(
        UserError, match=r"block=2-seed-0 holds .*\n  optim.query_lr: 0.1 there, 0.2 asked for"
    ):
        study(recipe, out, minutes=0)


def test_a_model_that_does_not_fit_is_known_before_anything_runs(recipe, tmp_path):
    recipe.write_text(recipe.read_text() + '\n[[runs]]\n"model.heads" = [2, 3]\n')
    with pytest.raises(UserError, match=r"^run heads-3 does not fit: heads must divide dim"):
        study(recipe, tmp_path / "study", minutes=0)
    assert not (tmp_path / "study" / "runs").exists()


def test_a_corpus_that_is_too_short_is_known_before_anything_runs(recipe, tmp_path):
    recipe.write_text(recipe.read_text() + '\n[[runs]]\n"model.context" = [32, 65536]\n')
    short = r"^run context-65536 does not fit: the corpus is shorter than the context: .* lower model.context"
    with pytest.raises(UserError, match=short):
        study(recipe, tmp_path / "study", minutes=0)
    assert not (tmp_path / "study" / "runs").exists()


def test_an_option_that_no_residual_has_is_said_once(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("block=2", "blokc=2"))
    once = r"does not fit: residual 'attnres-block' has no option 'blokc'. Did you mean 'block'\? Valid options: block"
    with pytest.raises(UserError, match=rf"^run residual-attnres-block_blokc=2-seed-0 {once}"):
        study(recipe, tmp_path / "study", minutes=0)
    with pytest.raises(UserError, match=rf"^{once.partition(': ')[2]}"):
        compare(
            tiny(tmp_path), tmp_path / "compared", residuals=["attnres-block:blokc=2"], seeds=[0]
        )


def test_an_interrupted_study_names_the_command_that_goes_on(recipe, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "headwater.train.studies.run_all", lambda *_, go_on, **__: said.append(go_on) or {}
    )
    study(recipe, tmp_path / "else where")
    assert main(shlex.split(said[0])[1:]) == 0
    assert said == [f"headwater study {recipe} --out '{tmp_path / 'else where'}'"] * 2
    with without_plugins():
        register("from-elsewhere")(
            type("Elsewhere", (StandardResidual,), {"__module__": "elsewhere"})
        )
        recipe.write_text(
            recipe.read_text().replace(
                '"attnres-block:block=2"', '"from-elsewhere", "from-elsewhere"'
            )
        )
        study(recipe, tmp_path / "other")
    assert said[-1] == f"headwater study {recipe} --out {tmp_path / 'other'} --plugin elsewhere"


def test_minutes_count_from_the_call(recipe, tmp_path, monkeypatch):
    """A corpus that is prepared first takes its part of them."""
    given = []

    def slow(settings):
        time.sleep(0.5)
        return prepare(settings)

    monkeypatch.setattr("headwater.train.recipes.prepare", slow)
    monkeypatch.setattr(
        "headwater.train.studies.run_all", lambda *_, seconds, **__: given.append(seconds) or {}
    )
    for text in (
        recipe.read_text(),
        recipe.read_text() + "tokens_per_parameter = 20\n",
    ):  # which asks for the text first
        recipe.write_text(text)
        study(recipe, tmp_path / text[-4:-1], minutes=1)
        assert given[-1] <= 59.5
    study(recipe, tmp_path / "study")
    assert given[-1] == math.inf


def test_a_study_whose_minutes_are_over_says_so_and_how_it_goes_on(
    recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("headwater.train.studies.run_all", lambda *_, **__: {})
    for whole, why in ((False, "is begun after"), (True, "would end in")):
        study(recipe, tmp_path / "study", minutes=0.5, whole=whole)
        said = f"no other run {why} the 0.5 minutes; go on with: headwater study {recipe} --out {tmp_path / 'study'}\n"
        assert capsys.readouterr().out.endswith(said)
    study(recipe, tmp_path / "study", minutes=0)
    study(recipe, tmp_path / "study")
    assert "no other run" not in capsys.readouterr().out
    for minutes in (-1, math.nan):
        with pytest.raises(
            UserError,
            match=f"minutes must be 0, to start nothing, or a positive number; got {minutes}",
        ):
            study(recipe, tmp_path / "study", minutes=minutes)


def test_an_interrupted_study_has_a_table_of_what_is_done(recipe, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0")
        raise Interrupted("stopped by SIGINT", signal.SIGINT)

    monkeypatch.setattr("headwater.train.studies.run_all", interrupted)
    with pytest.raises(Interrupted):
        study(recipe, tmp_path / "study")
    assert [row["run"] for row in read_json(tmp_path / "study" / "table.json")] == [
        "residual-standard-seed-0"
    ]


def test_what_a_run_says_of_its_flags_is_told_of_the_recipes_settings(
    recipe, tmp_path, monkeypatch
):
    """Whoever runs a study gives no flags of `headwater train`."""
    hot = recipe.read_text() + '\n[[runs]]\n"optim.lr" = [1e30]\n"optim.warmup" = 0\n'
    recipe.write_text(hot)
    with pytest.raises(UserError, match="--lr") as diverged:
        begin_by_hand(recipe, tmp_path / "alone", "lr-1e+30-warmup-0")
    monkeypatch.setattr(
        "headwater.train.studies.run_all", lambda *_, **__: {"lr-1e+30": str(diverged.value)}
    )
    with pytest.raises(
        UserError, match=f"Settings are those of {recipe}; the same command tries again"
    ) as told:
        study(recipe, tmp_path / "study")
    advice = "with the same command and train.skip_nonfinite = 1 (or more), or try a lower optim.lr, a longer "
    assert (
        f"{advice}optim.warmup, a smaller optim.clip or model.qk_norm = true, in another --out"
        in str(told.value)
    )
    recipe.write_text(hot.replace('source = ["', 'source = ["no'))
    with pytest.raises(UserError, match=r"no corpus at no.*: data\.source takes text"):
        study(recipe, tmp_path / "study")


def test_a_run_that_diverged_is_a_result_and_is_not_repeated(recipe, tmp_path, monkeypatch, capsys):
    """The same settings would lead there again, at every call; other ones may not."""
    recipe.write_text(recipe.read_text() + '\n[[runs]]\n"optim.lr" = [1e30]\n"optim.warmup" = 0\n')
    out, hot, started = tmp_path / "study", "lr-1e+30-warmup-0", []

    def run_all(jobs, *_, **__):
        started.append([job.label for job in jobs])
        if hot not in started[-1] or len(started) > 1:
            return {}
        with pytest.raises(UserError, match="not finite") as diverged:
            begin_by_hand(recipe, out, hot)
        return {hot: str(diverged.value)}

    monkeypatch.setattr("headwater.train.studies.run_all", run_all)
    for _ in range(2):
        done = study(recipe, out)
        assert (done.diverged, len(done.finished), len(done.left)) == ((hot,), 0, 2)
    assert [hot in labels for labels in started] == [True, False]
    said = capsys.readouterr().out
    assert said.count("with the same command and train.skip_nonfinite = 1") == 1
    assert said.count(f"0 of 3 runs finished, 1 diverged ({hot}; not run again") == 2
    for changed in (
        "steps = 4\nskip_nonfinite = 1",
        "steps = 3",
    ):  # the latter makes it another run, which begins anew
        saved = out / "runs" / hot / "checkpoints" / "step-00000002"
        saved.mkdir(parents=True, exist_ok=True)
        write_json(out / "runs" / hot / "diverged.json", {"why": "as before"})
        recipe.write_text(recipe.read_text().replace("steps = 4", changed))
        study(recipe, out)
        assert hot in started[-1]
        assert saved.exists() == (changed != "steps = 3")


def test_brackets_in_messages_and_folders_are_printed_as_they_are(
    recipe, tmp_path, monkeypatch, capsys
):
    out, name = tmp_path / "[red]study", "residual-standard-seed-0"
    message = "the loss [1.5] of [bold]tokens[/bold] is not finite [/]"

    def run_all(*_, **__):
        (out / "runs" / name).mkdir(parents=True)
        write_json(out / "runs" / name / "diverged.json", {"why": message})
        return {name: message}

    monkeypatch.setattr("headwater.train.studies.run_all", run_all)
    study(recipe, out)
    before, _, said, after = capsys.readouterr().out.splitlines()
    assert said == message
    assert before.startswith(f"{out}: 0 of 2 runs finished")
    assert after.startswith(f"{out}: 0 of 2 runs finished, 1 diverged")


def test_a_study_names_each_warm_up_that_is_not_finished_once(
    recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("headwater.train.studies.run_all", lambda *_, **__: {})
    recipe.write_text(recipe.read_text() + '\n[[runs]]\n"train.steps" = [10, 12, 20]\n')
    begin_by_hand(recipe, tmp_path / "study", "steps-10")
    capsys.readouterr()
    study(recipe, tmp_path / "study")
    said = "the run ends at step {} of a warm-up of 20, at {} % of its learning rate: raise train.steps or lower optim"
    told = [said.format(4, 20) + ".warmup", said.format(12, 60) + ".warmup"]
    assert [line for line in capsys.readouterr().out.splitlines() if "warm-up" in line] == told
    for name, config in read_recipe(recipe).runs.items():
        if name != "steps-10":
            folder = tmp_path / "study" / "runs" / name
            folder.mkdir()
            write_json(folder / "config.json", settings_of(config, prepare(config.data)))
            write_json(folder / "diverged.json", {"why": "as it is"})
    capsys.readouterr()
    study(recipe, tmp_path / "study")
    assert "warm-up" not in capsys.readouterr().out, "what diverged is not run again"


def test_a_study_that_is_refused_leaves_a_run_that_diverged_as_it_is(recipe, tmp_path):
    out = tmp_path / "study"
    arms = ("standard", "attnres-block_block=2")
    folder, finished = (begin_by_hand(recipe, out, f"residual-{arm}-seed-0") for arm in arms)
    (folder / "summary.json").unlink()
    write_json(folder / "diverged.json", {"why": "by itself"})
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 3"))
    with pytest.raises(UserError, match=f"{finished} holds a run with other settings"):
        study(recipe, out)
    assert (folder / "diverged.json").exists()
    assert any((folder / "checkpoints").iterdir())


def test_a_study_with_nothing_to_do_says_so_once(recipe, tmp_path, capsys):
    recipe.write_text(recipe.read_text().replace(', "attnres-block:block=2"', ""))
    begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0")
    study(recipe, tmp_path / "study")
    assert capsys.readouterr().out == f"{tmp_path / 'study'}: 1 of 1 runs finished\n"


def test_what_is_left_is_never_said_to_take_no_time(tmp_path):
    said = [describe(StudyResult(tmp_path, {}, ("a", "b"), seconds)) for seconds in (20.0, 200.0)]
    assert said[0].endswith("; less than a minute for the 2 that are left")
    assert said[1].endswith("; about 3 minutes for the 2 that are left")
    assert describe(StudyResult(tmp_path, {}, ("a",), 20.0)).endswith(" for the one that is left")
    assert describe(StudyResult(tmp_path, {}, ("a",), 80.0)).endswith(
        "; about 1 minute for the one that is left"
    )


def test_the_time_that_is_left_counts_the_starts_of_processes(recipe, tmp_path):
    recipe.write_text(
        recipe.read_text().replace("[0]", "[0, 1, 2]").replace("jobs = 2", "jobs = 4")
    )
    folder = begin_by_hand(recipe, tmp_path / "study", "residual-standard-seed-0")
    write_json(folder / "summary.json", {**read_json(folder / "summary.json"), "seconds": 10.0})
    runs = read_recipe(recipe).runs
    work = [
        operations(config) / operations(runs["residual-standard-seed-0"])
        for config in runs.values()
    ]
    assert study(recipe, tmp_path / "study", minutes=0).seconds == pytest.approx(
        10 * (sum(work) - 1) / 4
    )
    (folder / "launch.json").touch()
    launched = (folder / "config.json").stat().st_mtime - 30
    os.utime(folder / "launch.json", (launched, launched))
    assert study(recipe, tmp_path / "study", minutes=0).seconds == pytest.approx(
        (5 * 30 + 10 * (sum(work) - 1)) / 4
    )


def test_the_time_that_is_left_goes_by_the_arms_own_runs(recipe, tmp_path):
    """Residuals differ in how long an operation takes them, and so do sizes."""
    recipe.write_text(
        recipe.read_text()
        .replace("[0]", '[0, 1]\n"model.layers" = [2, 4]')
        .replace("jobs = 2", "jobs = 1")
    )
    runs = read_recipe(recipe).runs

    def finish(name, rate):
        folder = begin_by_hand(recipe, tmp_path / "study", name)
        write_json(
            folder / "summary.json",
            {**read_json(folder / "summary.json"), "seconds": rate * work[name]},
        )

    def left(rates):
        found = study(recipe, tmp_path / "study", minutes=0)
        expected = sum(
            work[name] * next(rate for part, rate in rates.items() if part in name)
            for name in found.left
        )
        assert found.seconds == pytest.approx(expected)

    work = {name: operations(config) for name, config in runs.items()}
    finish("residual-standard-seed-0-layers-2", 1.0)
    left({"": 1.0})
    finish("residual-attnres-block_block=2-seed-0-layers-2", 3.0)
    left({"standard": 1.0, "": 3.0})
    finish("residual-attnres-block_block=2-seed-0-layers-4", 2.0)
    left({"standard": 1.0, "layers-2": 3.0, "layers-4": 2.0})


@pytest.mark.parametrize("tied", [False, True])
def test_steps_for_tokens_a_parameter_leave_embedding_and_head_out(tmp_path, tied):
    config = tiny(tmp_path, residual="standard", batch_size=2)
    config = replace(config, model=replace(config.model, tie_embeddings=tied))
    inner = (
        2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32) + 5 * 16
    )  # two layers of attention and MLP, and norms
    assert steps_for(config, 20.0) == math.ceil(20 * inner / (2 * 32))
