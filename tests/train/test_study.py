"""A study: what a recipe describes, run once, in pieces if need be."""

import json
import math
import shlex
import time
from contextlib import contextmanager

import pytest
from outside import without_plugins
from processes import Forked
from tinyrun import changed, go_back, tiny, write_corpus

from headwater.cli import main
from headwater.errors import UserError
from headwater.residuals import StandardResidual, register
from headwater.runs.files import read_json, with_hash
from headwater.train import load_file, study
from headwater.train.data.dataset import prepare
from headwater.train.files import write_json
from headwater.train.loop import train
from headwater.train.recipes import prepared, read_recipe, steps_for
from headwater.train.studies import operations

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
PLAIN, BLOCK = "residual-standard-seed-0", "residual-attnres-block:block=2-seed-0"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(corpus=write_corpus(tmp_path), cache=tmp_path / "cache"))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "study"


def change(recipe, old, new):
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))


def append(recipe, text):
    recipe.write_text(recipe.read_text() + text)


def look(recipe, out):
    """Ask how the study stands; nothing is started."""
    return study(recipe, out, minutes=0, progress=False)


def begin_by_hand(recipe, out, label, *, upto=None):
    """A run of the recipe in its place, as a study leaves it: finished, or cut off after a step."""
    prefix = label.replace(":", "_") + "-"
    (name,) = (name for name in look(recipe, out).left if name.startswith(prefix))
    folder = out / "runs" / name
    config = load_file(out / "settings" / f"{name}.json")
    train(changed(config, save_every=2), folder, progress=False)
    if upto is not None:
        go_back(folder, upto)
    return folder


@contextmanager
def from_elsewhere(**body):
    """A residual of another package."""
    with without_plugins():
        members = {"__module__": "elsewhere", **body}
        register("from-elsewhere")(type("Elsewhere", (StandardResidual,), members))
        yield


def test_a_recipe_is_the_product_of_its_lists(recipe):
    change(recipe, "[0]", "[0, 1]")
    append(recipe, "\n[[runs]]\noptim.lr = [0.1, 1]\ntokens_per_parameter = 20\n")
    # A repetition would count as a seed.
    same = '"train.seed" = [0, 1]\n"model.residual" = "standard"\n"train.steps" = 4\n'
    append(recipe, f"\n[[runs]]\n{same}")
    plan = read_recipe(recipe)
    assert [run.label for run in plan.runs] == [  # one seed of all before the next
        PLAIN,
        BLOCK,
        "lr-0.1-tokens_per_parameter-20",
        "lr-1-tokens_per_parameter-20",
        "residual-standard-seed-1",
        "residual-attnres-block:block=2-seed-1",
    ]
    last, fast = plan.runs[-1].config, plan.runs[3].config
    assert (last.model.residual, last.train.seed) == ("attnres-block:block=2", 1)
    inner = 2 * (16 * 16 * 3 + 3 * 16 * 32 + 2 * 16) + 16  # two layers, and the final norm
    assert (last.train.steps, fast.train.steps) == (4, -(-20 * inner // (4 * 32)))
    assert (fast.optim.lr, plan.jobs, plan.keep_weights) == (1.0, 2, False)
    assert plan.name == "pair"
    change(recipe, 'name = "pair"', "")
    assert read_recipe(recipe).name == "recipe"


@pytest.mark.parametrize("tied", [False, True])
def test_steps_for_tokens_a_parameter_leave_embedding_and_head_out(tmp_path, tied):
    config = tiny(tmp_path, residual="standard", batch_size=2, tie_embeddings=tied)
    layers = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32)
    norms = 5 * 16
    assert steps_for(config, 20.0) == math.ceil(20 * (layers + norms) / (2 * 32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 1", "unknown key 'nmae'; did you mean 'name'"),
        ("[runs]\n'optim.lr' = 1.0", r"needs at least one table \[\[runs\]\]"),
        ("[[runs]]\nlr = [1.0]", r"unknown section 'lr'; it stands under \[optim\]"),
        ("[[runs]]\n'optim.lr' = ['fast']", "optim.lr must be a finite number; got 'fast'"),
        ("[[runs]", "cannot read the recipe"),
    ],
)
def test_a_recipe_that_does_not_fit_says_what_does(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_recipe(tmp_path / "recipe.toml")


@pytest.fixture
def weights_at_starts(out, monkeypatch):
    """The number of runs with weights, each time that a run begins."""
    counts = []

    class Watched(Forked):
        def __init__(self, *arguments, **options):
            counts.append(len(list(out.glob("runs/*/checkpoints"))))
            super().__init__(*arguments, **options)

    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Watched)
    return counts


@pytest.mark.slow
def test_a_study_runs_what_is_missing_and_nothing_twice(recipe, out, capsys, weights_at_starts):
    """Weights go when their run is finished, not when the study is: those of a long study fill a disk."""
    change(recipe, "jobs = 2", "jobs = 1")
    nothing = look(recipe, out)
    assert (len(nothing.finished), len(nothing.left), nothing.seconds) == (0, 2, None)
    assert not any(out.glob("runs/*/config.json"))
    assert read_json(out / "table.json") == []
    done = study(recipe, out)
    assert (len(done.finished), done.left) == (2, ())
    assert "2 of 2 runs finished" in capsys.readouterr().out
    assert weights_at_starts == [0, 0]
    for folder in (out / "runs").iterdir():
        files = {path.name for path in folder.iterdir()}
        assert {"metrics.jsonl", "config.json", "summary.json"} <= files
        assert "checkpoints" not in files
    rows = read_json(out / "table.json")
    assert rows == json.loads(json.dumps(done.table()))
    assert [row["run"] for row in rows] == [*done.finished]
    for row, run in zip(rows, done.finished.values(), strict=True):
        assert row["bits_per_byte"] == run.bits_per_byte
        assert row["model"]["residual"] == run.residual
    (folder / "checkpoints").mkdir()  # as a call that was killed leaves them
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    assert study(recipe, out).finished.keys() == done.finished.keys()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
def test_weights_stay_where_the_recipe_says_so(recipe, out, weights_at_starts):
    change(recipe, "jobs = 2", "jobs = 1\nkeep_weights = true")
    study(recipe, out)
    study(recipe, out)
    assert weights_at_starts == [0, 1]
    assert len([*out.glob("runs/*/checkpoints")]) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps = 4", "steps = 8"),
        ("mlp_dim = 32\n", ""),  # which the size says then
        ('["standard", ', '["standard:", '),
    ],
)
def test_a_run_with_other_settings_is_another_run(recipe, out, capsys, old, new):
    """The folder of the first is named, because reports and fits would take it too."""
    folder = begin_by_hand(recipe, out, PLAIN)
    change(recipe, old, new)
    assert not look(recipe, out).finished
    study(recipe, out, minutes=0)
    assert f"of no run of this file: {folder.name}, in {out / 'runs'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("upto", "old", "new"),
    [
        (2, "[config.train]", "[config.train]\nlog_every = 3"),  # what is recorded
        (None, "[config.train]", "[config.train]\naccumulate = 2"),  # rounding
        # A bad step, which it had none of
        (None, "[config.train]", "[config.train]\nskip_nonfinite = 2"),
        (2, '"train.seed" = [0]', '"train.seed" = [1, 0]\n"optim.lr" = [1e-2, 3e-3]'),  # the lists
    ],
)
def test_a_run_keeps_its_folder_when_only_what_does_not_count_changes(recipe, out, upto, old, new):
    folder = begin_by_hand(recipe, out, PLAIN, upto=upto)
    change(recipe, old, new)
    result = look(recipe, out)
    assert folder.name in (result.finished if upto is None else result.left)
    settings = load_file(out / "settings" / f"{folder.name}.json")
    assert (settings.model.residual, settings.train.seed) == ("standard", 0)


@pytest.mark.parametrize("residual", ["standard", "attnres-block:block=2"])
def test_the_factor_of_queries_counts_where_there_are_some(recipe, out, residual):
    folder = begin_by_hand(recipe, out, f"residual-{residual}-seed-0")
    change(recipe, "[config.train]", "[config.optim]\nquery_lr = 0.2\n[config.train]")
    assert [*look(recipe, out).finished] == ([folder.name] if residual == "standard" else [])


def test_runs_that_compute_the_same_are_one(recipe, out):
    append(recipe, '"optim.query_lr" = [0.1, 0.2]\n"train.log_every" = [10, 20]\n')
    assert len(look(recipe, out).left) == 3, "the plain residual has no queries"


def test_another_text_is_another_run_wherever_it_lies(recipe, out, tmp_path):
    folder = begin_by_hand(recipe, out, PLAIN)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    change(recipe, str(tmp_path / "corpus"), str(tmp_path / "moved"))
    assert [*look(recipe, out).finished] == [folder.name]
    first = tmp_path / "moved" / "0.txt"
    text = first.read_text()
    first.write_text("another river")
    assert not look(recipe, out).finished
    first.write_text(text)
    assert [*look(recipe, out).finished] == [folder.name]


def test_a_name_stays_inside_runs_and_is_never_too_long(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change(recipe, '"pair"', '"../../escaped"')
    append(recipe, f'"data.text_field" = ["{"x" * 300}"]\n')
    result = study(recipe, minutes=0, progress=False)
    assert result.folder.resolve().parent == tmp_path / "runs"
    assert all(len(name) < 255 for name in result.left)


@pytest.mark.parametrize("there", ["compare.json", "a text.txt"])
def test_a_study_begins_in_a_folder_of_its_own(recipe, out, there):
    """A study in the folder of a comparison or a run would write over their table, and reports would mix them."""
    (out / "runs").mkdir(parents=True)
    (out / there).write_text("{}")
    with pytest.raises(UserError, match=rf"holds something else \({there}\), and a study needs"):
        look(recipe, out)
    (out / there).unlink()
    begin_by_hand(recipe, out, PLAIN)
    (out / "report.html").write_text("")  # beside runs
    assert len(look(recipe, out).left) == 1


def test_a_run_of_a_residual_from_elsewhere_counts(recipe, out):
    change(recipe, '"attnres-block:block=2"', '"from-elsewhere"')
    with from_elsewhere():
        folder = begin_by_hand(recipe, out, "residual-from-elsewhere-seed-0")
        config = read_json(folder / "config.json")
        assert config["model"]["residual"] == "from-elsewhere@elsewhere"
        assert [*look(recipe, out).finished] == [folder.name]


def work_of(recipe):
    runs = read_recipe(recipe).runs
    return {run.label: operations(run.config, prepared(run.config.data)) for run in runs}


def test_a_class_that_has_changed_since_is_looked_at_again(recipe):
    """A cell of a notebook registers it anew between two calls."""
    change(recipe, '"attnres-block:block=2"', '"from-elsewhere"')
    work = []
    for flops in (10, 1000):
        with from_elsewhere(flops_per_token=lambda self, flops=flops: flops):
            work.append(work_of(recipe)["residual-from-elsewhere-seed-0"])
    assert work[0] < work[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('"model.heads" = [2, 3]', "model.heads must divide dim"),
        ('"model.context" = [32, 65536]', "^run context-65536 does not fit: the corpus is shorter"),
        ('"model.residual" = ["mhc:n=2"]', "does not fit: .*has no option 'n'"),
    ],
)
def test_what_does_not_fit_is_known_before_anything_runs(recipe, out, table, message):
    append(recipe, f"\n[[runs]]\n{table}\n")
    with pytest.raises(UserError, match=message):
        look(recipe, out)
    assert not (out / "runs").exists()


def test_a_study_names_the_command_that_goes_on(recipe, tmp_path, engine):
    commands = []
    engine.append(lambda jobs, go_on, **_: commands.append(go_on))
    study(recipe, tmp_path / "else where")
    assert main(shlex.split(commands[0])[1:]) == 0
    assert commands == [f"headwater study {recipe} --out '{tmp_path / 'else where'}'"] * 2
    change(recipe, '"attnres-block:block=2"', '"from-elsewhere", "from-elsewhere"')
    with from_elsewhere():
        study(recipe, tmp_path / "other")
    assert commands[-1].endswith("--plugin elsewhere")


def test_minutes_count_from_the_call(recipe, tmp_path, engine, monkeypatch):
    """A corpus that is prepared first takes its part of them."""
    seconds_left = []
    engine.append(lambda jobs, seconds, **_: seconds_left.append(seconds))

    def slow(settings):
        time.sleep(0.5)
        return prepare(settings)

    monkeypatch.setattr("headwater.train.recipes.prepare", slow)
    study(recipe, tmp_path / "first", minutes=1)
    append(recipe, "tokens_per_parameter = 20\n")  # which asks for the text first
    study(recipe, tmp_path / "second", minutes=1)
    study(recipe, tmp_path / "third")
    assert max(seconds_left[:2]) <= 59.5
    assert seconds_left[2] == math.inf


def test_a_study_whose_minutes_are_over_says_how_it_goes_on(recipe, out, engine, capsys):
    for whole, why in ((False, "is begun after"), (True, "would end in")):
        study(recipe, out, minutes=0.5, whole=whole)
        assert f"no other run {why} the 0.5 minutes; go on with: " in capsys.readouterr().out
    study(recipe, out, minutes=0)
    study(recipe, out)
    assert "no other run" not in capsys.readouterr().out


def test_failures_are_told_in_the_words_of_recipes(recipe, out, engine):
    """Whoever runs a study gives no flags of `headwater train`."""
    engine.append(lambda jobs, **_: {jobs[0].label: "its words"})
    with pytest.raises(UserError, match=f"its words\n.*Settings are those of {recipe}; the same"):
        study(recipe, out)
    change(recipe, 'source = ["', 'source = ["no')
    with pytest.raises(UserError, match=r"no corpus at no"):
        study(recipe, out)


def test_a_run_that_diverged_is_a_result_and_is_not_repeated(recipe, out, engine, capsys):
    """The same settings would lead there again, at every call; other ones may not."""
    append(recipe, '\n[[runs]]\n"optim.lr" = [1e30]\n"optim.warmup" = 0\n')
    started = []

    def diverge(jobs, **_):
        started.append([job.label for job in jobs])
        for job in jobs:
            if job.label.startswith("lr-1e+30"):
                resume = (job.folder / "config.json").exists()
                with pytest.raises(UserError, match="not finite"):
                    train(job.config, job.folder, resume=resume, progress=False)
                return {job.label: "the loss [1.5] of [bold]tokens[/bold] is not finite [/]"}
        return {}

    engine.append(diverge)
    for _ in range(2):
        done = study(recipe, out)
        assert (len(done.diverged), len(done.finished), len(done.left)) == (1, 0, 2)
    assert [len(labels) for labels in started] == [3, 2]
    output = capsys.readouterr().out
    assert output.count("[bold]tokens[/bold] is not finite [/]") == 1, "not taken for markup"
    assert output.count("0 of 3 runs finished, 1 diverged (lr-1e+30-warmup-0-") == 2
    change(recipe, "steps = 4", "steps = 4\nskip_nonfinite = 1")
    study(recipe, out)
    assert len(started[-1]) == 3, "it may go on without the step"


def test_the_time_that_is_left_goes_by_the_arms_own_runs(recipe, out):
    """Residuals differ in how long an operation takes them, and so do sizes."""
    change(recipe, "[0]", '[0, 1]\n"model.layers" = [2, 4]')
    change(recipe, "jobs = 2", "jobs = 1")
    work = work_of(recipe)

    def finish(label, rate):
        folder = begin_by_hand(recipe, out, label)
        summary = read_json(folder / "summary.json")
        write_json(folder / "summary.json", with_hash({**summary, "seconds": rate * work[label]}))

    def left(rates):
        result = look(recipe, out)
        expected = 0.0
        for label, operations_of_run in work.items():
            if any(name.startswith(label.replace(":", "_")) for name in result.left):
                rate = next(rate for part, rate in rates.items() if part in label)
                expected += rate * operations_of_run
        assert result.seconds == pytest.approx(expected)

    finish(f"{PLAIN}-layers-2", 1.0)
    left({"": 1.0})
    finish(f"{BLOCK}-layers-2", 3.0)
    left({"standard": 1.0, "": 3.0})
    finish(f"{BLOCK}-layers-4", 2.0)
    left({"standard": 1.0, "layers-2": 3.0, "layers-4": 2.0})
