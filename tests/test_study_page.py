"""The study's tables are made from raw runs: of those in the repository as they are, and of a few made here."""

import json
import math
import re
import statistics
import tarfile
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from outside import without_plugins

from headwater.analyze.plot import Panel, lines_of, picture
from headwater.residuals.plugins import import_plugins
from headwater.residuals.registry import build
from headwater.runs.stats import NOT_SIGNIFICANT, SIGNIFICANT, t_quantile
from headwater.train.studies import study

STUDY = Path(__file__).parent.parent / "studies" / "attention-residuals"
CURVES = "<!-- curves:begin -->\n<!-- curves:end -->"


@pytest.fixture(scope="module")
def page(script):
    return script("studies/attention-residuals/page.py")


def archive(folder, recipe, runs):
    """`runs`: residual, seed, bits per byte, and further settings of the configuration."""
    root = folder / recipe
    for number, (residual, seed, score, further) in enumerate(runs):
        run = root / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        model = {"residual": residual, "dim": 8, "layers": 2, "shortswa": None}
        config = {"model": model, "optim": {"lr": 1e-3, "query_lr": 1.0, "optimizer": "adamw"}}
        for name, value in further.items():
            section, key = name.split(".")
            config[section][key] = value
        summary = {
            "bits_per_byte": score,
            "flops_per_token": 10,
            "tokens": further.get("model.dim", 1) * 1000,
        }
        summary["parameters"] = 1000 + 10 * len(further)
        (run / "config.json").write_text(
            json.dumps({**config, "train": {"seed": seed, "steps": 9}})
        )
        (run / "metrics.jsonl").write_text("")
        if score is not None:
            (run / "summary.json").write_text(
                json.dumps({**summary, "residual": residual, "seed": seed})
            )
    with tarfile.open(folder / f"{recipe}.tar.xz", "w:xz") as packed:
        packed.add(root, recipe)


def test_the_page_is_what_the_raw_runs_give(page):
    with page.unpacked(STUDY / "runs") as found:
        assert found["noise"]
        texts = [file.read_text(encoding="utf-8") for file in page.PAGES]
        assert [page.filled(text, found) for text in texts] == texts
        text = "".join(texts)
        # Which has not run
        made = {*page.TABLES, *page.OF_ALL, *page.OF_SCALING, *page.MEASURED} - {"longer"}
        assert sorted(name for _, name, _ in page.MARKS.findall(text)) == sorted(made)
        for file, drawn in page.pictures.pictures(found).items():
            assert file.read_text(encoding="utf-8") == drawn
            assert f"(../assets/{file.name})" in text
        plain = [page.tables.score(run) for run in found["noise"] if run.residual == "standard"]
    assert (
        f"| `standard` | {len(plain)} | {statistics.fmean(plain):.4f} | {statistics.stdev(plain):.4f} |"
        in text
    )


@pytest.fixture(scope="module")
def rivals():
    """The arms that headwater has no name for are known."""
    with without_plugins(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        import_plugins(["rivals", "examples.new_residual"])
        yield


@pytest.mark.parametrize(
    "recipe", [file.name.removesuffix(".tar.xz") for file in (STUDY / "runs").glob("*.tar.xz")]
)
def test_a_recipe_goes_on_from_its_archive(recipe, rivals, script, tmp_path, monkeypatch):
    """As README.md says: what is packed there is what the recipe asks for, though defaults have changed since."""
    with tarfile.open(STUDY / "runs" / f"{recipe}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    text = script("studies/attention-residuals/migrate.py").TEXT
    parts = {"identity": text, "tokenizer": SimpleNamespace(vocab_size=8192)}
    tokens = SimpleNamespace(**parts, check_length=lambda context: None)
    monkeypatch.setattr("headwater.train.recipes.prepare", lambda data: tokens)
    found = study(STUDY / f"{recipe}.toml", tmp_path / recipe, minutes=0, progress=False)
    packed_runs = {
        run.name: (run / "summary.json").exists() for run in (tmp_path / recipe / "runs").iterdir()
    }
    assert found.finished.keys() == {name for name, ended in packed_runs.items() if ended}
    assert {name for name, ended in packed_runs.items() if not ended} <= {
        *found.left,
        *found.diverged,
    }


def test_noise_is_told_in_pairs_with_what_more_seeds_would_tell(page, tmp_path):
    scores = {"standard": [1.50, 1.52, 1.51], "attnres-block": [1.46, 1.47, 1.48]}
    runs = [
        (arm, seed, score, {})
        for arm, values in scores.items()
        for seed, score in enumerate(values)
    ]
    archive(tmp_path, "noise", runs)
    with page.unpacked(tmp_path) as found:
        text = page.tables.noise(found["noise"])
    differences = [-0.04, -0.05, -0.03]
    half = t_quantile(0.05, 2) * statistics.stdev(differences) / 3**0.5
    low, high = (page.tables.signed(-0.04 + side * half) for side in (-1, 1))
    assert (
        f"| `attnres-block` | 3 | 1.4700 | 0.0100 | −0.0400 | {low} to {high} | significant (95 %) |"
        in text
    )
    assert f"| 4 | {t_quantile(0.05, 3) * 0.01 / 2:.4f} |" in text


def test_arms_that_differ_in_what_is_around_the_residual_are_told_apart(page, tmp_path):
    runs = [("standard", 0, 1.5, {}), ("standard", 1, 1.6, {})]
    runs += [
        ("standard", seed, score, {"model.shortswa": 4}) for seed, score in ((0, 1.4), (1, 1.5))
    ]
    runs += [(arm, 0, 1.7, {"model.depth_start": False}) for arm in ("standard", "completep")]
    archive(tmp_path, "ablations", runs)
    with page.unpacked(tmp_path) as found:
        text = page.TABLES["ablations"](found["ablations"])
    assert "| `standard` | 2 | 1.5500 |" in text
    assert (
        "| `standard+shortswa=4` | 2 | 1.4500 | 0.0707 | −0.1000 | - | −6.5 % |  | +1.0 % |" in text
    )
    assert "| `standard+depth_start=false` | 1 | 1.7000 | - | +0.2000 |" in text
    assert "| `completep` | 1 | 1.7000 |" in text


def test_ablations_are_sorted_and_stand_beside_the_papers(page, tmp_path):
    scores = {"standard": 1.5, "mhc": 1.6, "attnres-full": 1.35, "attnres-full:window=8": 1.4}
    archive(tmp_path, "ablations", [(arm, 0, score, {}) for arm, score in scores.items()])
    with page.unpacked(tmp_path) as found:
        residuals, options = page.tables.ablations(found["ablations"]).split(
            "Options of Attention Residuals:"
        )
    assert re.findall(r"^\| `(.+?)`", residuals, re.M) == ["attnres-full", "standard", "mhc"]
    assert re.findall(r"^\| `(.+?)`", options, re.M) == ["attnres-full", "attnres-full:window=8"]
    # Of the paper's losses: 1.747 beside 1.766
    assert "| +0.1000 | - | +6.7 % | −1.1 % |" in residuals


def test_two_seeds_of_an_ablation_that_agree_are_told_from_what_two_seeds_can_tell_on(
    page, tmp_path
):
    """With two seeds an interval is as narrow as they happen to be near each other; more seeds are judged by theirs."""
    apart = {"mhc": (0.034, 2), "ddl": (-0.034, 3), "laurel": (0.035, 2), "highway": (-0.035, 2)}
    runs = [("standard", seed, 1.5, {}) for seed in range(3)]
    runs += [
        (arm, s, 1.5 + far + s / 1e5, {})
        for arm, (far, seeds) in apart.items()
        for s in range(seeds)
    ]
    archive(tmp_path, "ablations", runs)
    with page.unpacked(tmp_path) as found:
        rows = page.tables.ablations(found["ablations"]).splitlines()
    verdicts = {row.split("`")[1]: row.split(" | ")[-1].strip(" |") for row in rows if "`" in row}
    expected = dict.fromkeys(("ddl", "laurel", "highway"), SIGNIFICANT) | {"mhc": NOT_SIGNIFICANT}
    assert {arm: verdicts[arm] for arm in expected} == expected


def test_each_arm_is_beside_the_plain_residual_at_its_own_best_rate(page, tmp_path):
    scores = {
        ("standard", 1e-3): (1.5, 1.7),
        ("standard", 2e-3): (1.4, 1.5),
        ("ddl", 1e-3): (1.3, 1.41),
        ("ddl", 2e-3): (9, 9),
    }
    runs = [
        (arm, seed, score, {"optim.lr": rate})
        for (arm, rate), both in scores.items()
        for seed, score in enumerate(both)
    ]
    archive(tmp_path, "rates", runs)
    with page.unpacked(tmp_path) as found:
        text = page.tables.rates(found["rates"])
    assert "| 8 | `ddl` | 0.001 | 0.002 | 2 | −0.0950 |" in text


def test_pictures_have_a_dot_for_each_run_and_a_line_through_the_means(page):
    points = {"standard": {1e-3: [1.6, 1.7], 2e-3: [1.5, 1.9]}}
    drawn = picture([Panel("bits", "rate", lines_of(points), log=True)], "a label")
    assert drawn.count("<circle") == 4
    places = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    line = [float(y) for y in re.findall(r",([\d.]+)", re.search(r'points="([^"]+)"', drawn)[1])]
    assert line == pytest.approx(
        [(places[0] + places[1]) / 2, (places[2] + places[3]) / 2], abs=0.1
    )
    assert places[3] == min(places), "more is higher"
    assert ElementTree.fromstring(drawn).attrib["aria-label"] == "a label"


def recorded(residual, rate, *records):
    """A run whose depth was recorded: weights of each read, at each step."""
    depth = [
        {
            "step": step,
            "mixing": rows,
            "entropy": [-sum(w * math.log(w) for w in row if w) for row in rows],
        }
        for step, rows in records
    ]
    config = {"model": {"residual": residual, "dim": 8, "layers": 2}, "optim": {"lr": rate}}
    return SimpleNamespace(residual=residual, config=config, depth=depth)


def test_outputs_in_effect_are_fewer_where_weights_are_a_choice(page):
    even, chosen = [[1, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3], [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    runs = [recorded("attnres-full", 1e-3, (1, even), (2, rows)) for rows in (even, chosen)]
    runs.append(recorded("attnres-block", 2e-3, (1, chosen), (2, chosen)))
    text = page.tables.evenness([*runs, recorded("standard", 1e-3, (2, even))], "optim.lr")
    assert (
        "(all even: 2), at steps 1, 2; means over reads and seeds, whose standard deviation is at most 0.71:\n"
        in text
    )
    assert "| `optim.lr` | `attnres-block` | `attnres-full` |\n" in text
    assert text.endswith("| 0.001 | - | 2.00, 1.50 |\n| 0.002 | 1.00, 1.00 | - |\n")


def test_maps_are_means_over_seeds_in_even_shares(page):
    """Rows that sum to more than one, as those of blocks do, are made to sum to one first."""
    first, second = [[1, 0], [1.5, 0.5]], [[1, 0], [0.5, 1.5]]
    runs = [recorded("attnres-block", 8e-3, (5, rows), (9, first)) for rows in (first, second)]
    early, late = page.pictures.maps_of([*runs, recorded("standard", 8e-3, (5, first))])
    assert (early.title, late.title) == ("Block, 2 layers, step 5", "Block, 2 layers, step 9")
    assert (early.shares, late.shares) == ([[1, 0], [1, 1]], [[1, 0], [1.5, 0.5]])
    drawn = picture([early, late], "maps")
    assert 'd="M0 0h1v1h-1zM0 1h2v1h-2z" fill="currentColor" fill-opacity="1.00"' in drawn
    assert "the most: 1.5 even shares" in drawn  # in a dark picture it is the lightest
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("spread", [0.5, 0.05, 0.015, 0.0015])
def test_lines_of_a_picture_are_called_what_they_are(page, spread):
    """At equal distances, as they are drawn."""
    lines = lines_of({"standard": {1: [1.495], 2: [1.495 + spread]}})
    drawn = picture([Panel("bits", "rate", lines)], "a label")
    texts = [
        node.text
        for node in ElementTree.fromstring(drawn).iter()
        if node.get("text-anchor") == "end"
    ]
    values = [float(text) for text in texts]
    steps = [later - earlier for earlier, later in pairwise(values)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-6)


@pytest.mark.browser
def test_names_beside_lines_are_not_cut_off(page, visit, tmp_path):
    """In whatever font the machine has; on many a Linux that is a wide one."""
    lines = lines_of(
        {"momentum:start=0.5": {1: [1.0], 2: [2.0]}, "muddformer": {1: [1.0], 2: [1.5]}}
    )
    (tmp_path / "drawn.html").write_text(picture([Panel("bits", "rate", lines)], "a label"))
    ends = "svg => [...svg.querySelectorAll('.named')].map(name => name.getBBox()).map(box => box.x + box.width)"
    svg = visit(tmp_path / "drawn.html").locator("svg")
    assert max(svg.evaluate(ends)) <= svg.evaluate("svg => svg.viewBox.baseVal.width")


def test_panels_come_two_in_a_row(page):
    panel = Panel("bits", "rate", lines_of({"standard": {1: [1.0], 2: [2.0]}}))
    sizes = []
    for count in (1, 2, 4):
        *_, wide, high = (
            ElementTree.fromstring(picture([panel] * count, "a label")).get("viewBox").split()
        )
        sizes.append((int(wide), int(high)))
    (wide, high), two, four = sizes
    assert two == (2 * wide, high)
    assert four == (2 * wide, 2 * high)


def test_growth_with_depth_is_the_last_quarter_over_the_first_and_the_slope_of_the_logarithm(page):
    assert page.tables.growth([1, 3, 100, 100, 100, 100, 5, 7]) == 3
    assert page.tables.slope([math.exp(2 * i / 7) for i in range(8)]) == pytest.approx(2)
    runs = [
        SimpleNamespace(residual="standard", summary={"bits_per_byte": 1.5}, depth=[first, last])
        for last in (
            {
                "output_norm": [1, 2, 3, 4],
                "read_norm": [1, 1, 1, 1, 3],
                "gradient_norm": [4, 2, 2, 2],
                "step": 20,
            },
            {
                "output_norm": [1, 2, 3, 6],
                "read_norm": [1, 1, 1, 1, 3],
                "gradient_norm": [4, 2, 2, 2],
                "step": 20,
            },
        )
        for first in (
            {
                "output_norm": [1] * 4,
                "read_norm": [1] * 5,
                "gradient_norm": [9, 9, 9, 9],
                "step": 10,
            },
        )
    ]
    for run, rate in zip(runs, (page.tables.MAPPED, page.tables.MAPPED), strict=True):
        run.config = {"model": {"dim": 8, "layers": 2}, "optim": {"lr": rate}}
    text = page.tables.dynamics(runs)
    assert "| 8 | 2 | 0.008 | `standard` | 2 | 1.5000 ± 0.0000 | 5.00 ± 1.41 | " in text
    assert " | 3.00 ± 0.00 | 0.88 ± 0.00 | 0.50 ± 0.00 | −0.62 ± 0.00 |\n" in text
    assert "| layers |  |  | step 10 | step 20 |\n" in text
    assert "| 2 | `standard` | outputs | 1.00 ± 0.00 | 5.00 ± 1.41 |\n" in text


def test_every_recipe_names_arms_that_exist():
    ours = {"completep": "rivals.py", "embedding-skip": "../../examples/new_residual.py"}
    for name, module in ours.items():
        assert f'@register("{name}")' in (STUDY / module).read_text()
    for recipe in STUDY.glob("*.toml"):
        content = tomllib.loads(recipe.read_text())
        assert content["name"] == recipe.stem
        arms = {arm for runs in content["runs"] for arm in runs["model.residual"]}
        for arm in arms - ours.keys():
            build(arm, 128, 24)


def test_a_best_rate_at_the_edge_is_called_unknown(page, tmp_path):
    tried = {"standard": (1.6, 1.5, 1.55), "attnres-block": (1.6, 1.5, 1.4)}
    runs = [
        (arm, seed, score + seed / 100, {"optim.lr": lr})
        for arm, scores in tried.items()
        for lr, score in zip((1e-3, 2e-3, 4e-3), scores)
        for seed in (0, 1)
    ]
    archive(tmp_path, "rates", runs)
    with page.unpacked(tmp_path) as found:
        text = page.tables.rates(found["rates"])
    assert "Width 8, 2 layers:" in text
    assert "| 0.002 | **1.5050 ± 0.0071** | 1.5050 ± 0.0071 |" in text
    assert "| 0.004 | 1.5550 ± 0.0071 | **1.4050 ± 0.0071** |" in text
    assert "so not yet known, for: attnres-block.\n" in text


def test_a_run_without_a_result_is_named(page, tmp_path):
    """A mean over the seeds that did not diverge speaks of those alone."""
    lower, higher = ({"optim.lr": rate} for rate in (5e-4, 2e-3))
    runs = [("standard", 0, 1.5, {}), ("standard", 1, None, {}), ("standard", 0, 1.6, lower)]
    archive(tmp_path, "rates", [*runs, ("standard", 0, None, higher), ("highway", 0, None, higher)])
    for number in (1, 3, 4):
        log = tmp_path / "rates" / "runs" / f"run-{number}" / "log.txt"
        log.write_text("headwater: the loss or gradient is not finite at step 2.\n")
    with tarfile.open(tmp_path / "rates.tar.xz", "w:xz") as packed:
        packed.add(tmp_path / "rates", "rates")
    with page.unpacked(tmp_path) as found:
        text = page.filled("<!-- rates:begin -->\n<!-- rates:end -->", found)
    assert "| 0.001 | **1.5000** | - |" in text
    assert "| 0.002 | fails | fails |\n" in text
    assert "not yet known" not in text  # the best rate is between a worse one and one that fails
    assert (
        "not in the table: `run-1` (its last words were: the loss or gradient is not finite at step 2);"
        in text
    )


def test_arms_of_kimi_linear_are_compared_at_rates_of_several_seeds_and_through_training(page):
    def run(arm, seed, rate, *scores):
        return evaluated(arm, seed, dict(zip((5, 9), scores)), lr=rate)

    runs = [run("standard", 0, 4e-3, 1.6, 1.4), run("attnres-block", 0, 4e-3, 1.6, 1.3)]
    for seed in (0, 1):
        runs += [
            run("standard", seed, 2e-3, 1.6, 1.45),
            run("attnres-block", seed, 2e-3, 1.55, 1.44),
        ]
    for seed in (0, 1, 2):
        runs += [
            run("standard", seed, 1e-3, 1.6, 1.5),
            run("attnres-block", seed, 1e-3, 1.55, 1.48 + seed / 100),
        ]
    text = page.tables.hybrid(runs)
    assert "| 0.004 | **1.4000** | **1.3000** |" in text
    assert [line for line in text.splitlines() if line.startswith("At ")] == [
        "At 0.001, and the differences after these steps:",
        "At 0.002, and the differences after these steps:",
    ]
    assert (
        "| `attnres-block` | 2 | 1.4400 | 0.0000 | −0.0100 | −0.0100 to −0.0100 | significant (95 %) |"
        in text
    )
    assert (
        "| `attnres-block` | 3 | 1.4900 | 0.0100 | −0.0100 | −0.0348 to +0.0148 | no significant difference |"
        in text
    )
    assert (
        "| `attnres-block` | −0.0500 (−0.0500 to −0.0500) | −0.0100 (−0.0348 to +0.0148) |" in text
    )


def test_the_queries_factor_is_told_by_width_by_optimizer_and_by_rate(page, tmp_path):
    settings = "optim.optimizer", "optim.lr", "model.dim", "optim.query_lr"
    runs = [
        ("attnres-block", 0, score, dict(zip(settings, (*case, factor))))
        for case, scores in (
            (("adamw", 1e-3, 8), (1.5, 1.4, 1.6)),
            (("adamw", 2e-3, 8), (1.1, 1.0, 1.2)),
            (("muon", 1e-3, 8), (1.3, 1.2, 1.3)),
            (("adamw", 1e-3, 16), (1, 2, 3)),
        )
        for factor, score in zip((0.1, 0.3, 1.0), scores)
    ]
    archive(tmp_path, "transfer", runs)
    with page.unpacked(tmp_path) as found:
        narrow, wide = page.TABLES["transfer"](found["transfer"]).split("Width 16")
    arms = " | ".join(
        f"`attnres-block` {case}" for case in ("adamw 0.001", "adamw 0.002", "muon 0.001")
    )
    assert f"| {arms} |" in narrow
    assert "| 0.3 | **1.4000** | **1.0000** | **1.2000** |" in narrow
    assert "so not yet known, for: attnres-block adamw 0.001." in wide


def test_the_plain_residual_has_no_queries_and_is_not_of_a_sweep_of_their_factor(page, tmp_path):
    runs = [
        ("standard", 0, 1.6, {"optim.query_lr": 0.1}),
        ("standard", 1, 1.6, {"optim.query_lr": 1.0}),
    ]
    runs += [("attnres-block", 0, 1.5, {"optim.query_lr": factor}) for factor in (0.1, 0.3)]
    archive(tmp_path, "query", runs)
    with page.unpacked(tmp_path) as found:
        text = page.tables.query(found["query"])
    assert "layers; the plain residual has 1.6000 ± 0.0000 (" in text
    assert "`standard`" not in text


def test_an_arm_with_a_rate_of_its_own_is_at_that_in_the_scaling(page, tmp_path):
    arms = [("standard", 8e-3), ("completep", 8e-3), ("completep", 1.6e-2)]
    archive(
        tmp_path,
        "rates",
        [(arm, 0, 1 + rate, {"model.dim": 192, "optim.lr": rate}) for arm, rate in arms],
    )
    with page.unpacked(tmp_path) as found:
        text = page.curves.scaling(page.taken("scaling", found))
    assert "learning rate 0.008, 0.016 of `completep`:\n" in text
    assert "| `completep` | 1 | 1.0160 |" in text
    assert "1.0080 | - | +" not in text


def test_runs_made_again_are_told_apart_from_other_seeds(page, tmp_path):
    archive(
        tmp_path,
        "rates",
        [("standard", seed, score, {}) for seed, score in ((0, 1.0), (1, 2.0), (2, 9.0))],
    )
    archive(
        tmp_path, "query", [("standard", seed, score, {}) for seed, score in ((0, 1.2), (1, 2.2))]
    )
    with page.unpacked(tmp_path) as found:
        row = page.repeats.again(found).splitlines()[-1]
    assert row.endswith("| `standard` | 2 | 4 | 0.1414 | 0.2000 | 0.7071 | 1.6000 |")


def test_repeats_stand_together_the_version_that_needs_most_memory_first(page):
    def run(residual, seed, memory, end):
        found = evaluated(residual, seed, {500: 1.7, 1000: 1.6, 1472: end}, optimizer="adamw")
        found.summary["peak_memory_bytes"] = memory
        return found

    early = [run("standard", 0, 2e9, 1.52), run("standard", 1, 2e9, 1.51), run("mhc", 0, 2e9, 1.5)]
    later = [run("mhc", 0, 1e9, 1.5), run("standard", 0, 1e9, 1.5)]
    del later[1].evals[1]
    assert page.repeats.repeats({"ablations": later, "rates": early}).splitlines()[2:] == [
        "| 0.008 | `standard` | 0 | 2000 | 1.7000 | 1.6000 | 1.5200 |",
        "| 0.008 | `standard` | 0 | 1000 | 1.7000 | - | 1.5000 |",
    ]


def test_copying_is_told_by_what_the_second_telling_gains_beside_the_score(page):
    runs = [("late", 9.0, 9.0, 1.6), ("between", 10.0, 3.0, 1.5), ("early", 9.0, 1.0, 1.4)]
    measured = [
        dict(zip(("run", "first", "second", "bits_per_byte"), run, strict=True)) for run in runs
    ]
    text = page.tables.copying(measured)
    rows = [
        "| `early` | 9.00 | 8.00 | 1.4000 |",
        "| `between` | 10.00 | 7.00 | 1.5000 |",
        "| `late` | 9.00 | 0.00 | 1.6000 |",
    ]
    assert text.splitlines()[2:5] == rows
    assert text.endswith("over the 3 runs: −0.92, of their ranks −1.00.\n")
    assert "Correlation" not in page.tables.copying(measured[:2])


def evaluated(residual, seed, rows, **settings):
    """A run of the smallest size with what it scored at some steps, the last of which is its end."""
    model = {"residual": residual, "dim": 128, "layers": 12, "shortswa": None}
    config = {"model": model, "optim": {"lr": 8e-3, "query_lr": 0.1, **settings}}
    config["train"] = {"steps": [*rows][-1]}
    evals = [{"step": step, "bits_per_byte": value} for step, value in rows.items()]
    summary = {"bits_per_byte": [*rows.values()][-1], "parameters": 1000}
    return SimpleNamespace(
        residual=residual, seed=seed, config=config, evals=evals, summary=summary, depth=[]
    )


def test_runs_that_fell_early_are_told_from_the_others(page):
    falls = (0.1, 0.2, 0.1)
    runs = [
        evaluated("standard", n, {500: 1.7, 1000: 1.7 - fall, 1472: 1.5 - fall})
        for n, fall in enumerate(falls)
    ]
    others = [
        evaluated("attnres-full", n, {500: 1.6, 1000: 1.5, 1472: 1.4}, query_lr=1.0)
        for n in range(3)
    ]
    others += [evaluated("standard", n, {500: 1.7, 1000: 1.4, 2944: 1.3}) for n in range(3)]
    few = [evaluated("mhc", n, {500: 1.6, 1000: 1.5, 1472: 1.4}) for n in range(2)]
    text = page.repeats.onset({"rates": runs[:2] + others, "query": runs[2:] + few})
    assert text.splitlines()[2:] == [
        "| `standard` | 3 | 1.7000 ± 0.0000 | 1 | 1.3000 | 1.4000 ± 0.0000 |"
    ]


def test_a_drop_is_drawn_less_the_run_that_saw_the_same_text(page):
    def run(residual, seed, rate, losses):
        found = evaluated(residual, seed, {500: 1.0}, lr=rate)
        found.train = [{"step": 300 + 50 * n, "loss": loss} for n, loss in enumerate(losses)]
        return found

    noise = [run("standard", seed, 3e-3, [5 + seed, 4 + seed, 3 + seed]) for seed in (0, 1)]
    rates = [
        run("attnres-full", seed, page.curves.RULE[128], [4 + seed, 3 + seed, -1 + seed])
        for seed in (0, 1, 2)
    ]
    (panel,) = page.pictures.drops(
        {"noise": noise, "rates": [*rates, run("attnres-full", 0, 1e-3, [1, 1, 1])]}
    )
    assert [(line.name, line.points) for line in panel.lines] == [
        (f"seed {s}", {350: [-2]}) for s in (0, 1)
    ]


def test_ablations_have_the_difference_before_the_drop_too(page):
    runs = [evaluated("standard", seed, {500: 1.7, 1472: 1.5}) for seed in (0, 1)]
    runs += [evaluated("attnres-full", seed, {500: 1.6 + seed / 10, 1472: 1.4}) for seed in (0, 1)]
    row = next(line for line in page.tables.ablations(runs).splitlines() if "attnres-full" in line)
    assert "| 1.4000 | 0.0000 | −0.1000 | −0.0500 | −6.7 % | −1.6 % | +0.0 % |" in row


def test_sizes_are_told_with_their_passes_over_the_text(page, tmp_path):
    archive(
        tmp_path,
        "scaling",
        [("standard", 0, 1.3, {"model.dim": 128, "model.layers": 12, "optim.lr": 1.1e-2})],
    )
    with page.unpacked(tmp_path) as found:
        run = found["scaling"][0]
        run.summary.update(
            tokens=7 * page.curves.TEXT,
            steps=7,
            parameters=35 * page.curves.TEXT // 100 + 2 * 128 * 50_000,
        )
        run.config["model"]["vocab_size"] = 50_000
        row = "| 2 million | 128 | 12 | 7 | 717 million | 20 | 7.0 | 0.011 |"
        assert page.curves.sizes(found).splitlines()[-1] == row


def test_scaling_shows_the_compute_that_an_arm_saves(page, tmp_path):
    """The same law with half the compute."""
    runs = [
        (arm, seed, 1 + (saved * size) ** -0.5, {"model.dim": size})
        for arm, saved in (("standard", 1), ("attnres-block", 2))
        for size in (1, 10, 100, 1000)
        for seed in (0, 1)
    ]
    archive(tmp_path, "scaling", runs)
    with page.unpacked(tmp_path) as found:
        runs = found["scaling"]
        text = "".join(
            make(runs)
            for make in (page.curves.fits, page.curves.missed, page.curves.without_a_size)
        )
        row, off, smaller, larger = [line for line in text.splitlines() if "attnres" in line]
        sizes = [line for line in page.curves.scaling(runs).splitlines() if "attnres" in line]
        two = [run for run in runs if run.config["model"]["dim"] < 100]
        assert page.filled(CURVES, {"scaling": two}) == CURVES.replace(
            "\n", "\nThe curves need a third size.\n", 1
        )
    assert row.count("2.00 (2.00 to 2.00)") == 4
    assert smaller.count("2.00 (2.00 to 2.00)") == larger.count("2.00 (2.00 to 2.00)") == 3
    assert re.sub("[−+]", "", off) == "| `attnres-block` | 0.0000 | 0.0000 | 0.0000 | 0.0000 |"
    assert re.findall(r"Without width (\d+):", text) == ["1000", "1"]
    assert (
        sizes[0]
        == "| `attnres-block` | 2 | 1.7071 | 0.0000 | −0.2929 | −0.2929 to −0.2929 | significant (95 %) |"
    )
    assert len(sizes) == 4


def test_arms_stand_beside_full_where_two_seeds_have_both(page, tmp_path):
    scores = {
        "standard": (1.9, 1.8, 1.7),
        "attnres-full": (1.5, 1.4, 1.3),
        "attnres-block": (1.7, 1.5),
        "mhc": (1.6,),
    }
    archive(
        tmp_path,
        "scaling",
        [(arm, seed, one, {}) for arm, each in scores.items() for seed, one in enumerate(each)],
    )
    with page.unpacked(tmp_path) as found:
        (row,) = page.curves.beside_full(found["scaling"]).splitlines()[2:]
    wide = t_quantile(0.05, 1) * 0.05  # of two differences, 0.2 and 0.1
    assert (
        row
        == f"| 8 | `attnres-block` | 2 | +0.1500 | −{wide - 0.15:.4f} to +{wide + 0.15:.4f} | {NOT_SIGNIFICANT} |"
    )


def test_leads_are_told_through_training_of_seeds_that_both_have(page):
    def run(residual, seed, dim, rows):
        found = evaluated(residual, seed, rows)
        found.config["model"]["dim"] = dim
        return found

    runs = [run("standard", seed, 128, {1000: 1.7, 1472: 1.5}) for seed in (0, 1)]
    runs += [run("mhc", seed, 128, {1000: 1.6, 1472: 1.5 - seed / 10}) for seed in (0, 1, 2)]
    runs += [run("standard", 0, 192, {1000: 1.6, 2000: 1.5, 4000: 1.4, 4324: 1.3})]
    runs += [
        run("mhc", 0, 192, {1000: 1.5, 2000: 1.5, 4000: 1.5, 4324: 1.5}),
        run("ddl", 1, 192, {4324: 1.0}),
    ]
    assert page.curves.lead(runs).splitlines()[2:] == [
        "| 128 | `mhc` | 2 | −0.1000 ± 0.0000 |  |  |  | −0.0500 ± 0.0707 |",
        "| 192 | `mhc` | 1 | −0.1000 | +0.0000 | +0.1000 |  | +0.2000 |",
    ]


def test_scaling_shows_where_means_lie_off_their_curve(page, tmp_path):
    """Two seeds that differ, and a size that is off the law; an arm with three sizes has nothing to show."""
    runs = [
        (
            arm,
            seed,
            1 + size**-0.5 + (0.05 if size == 100 else 0) + (-1) ** seed * 1e-3,
            {"model.dim": size},
        )
        for arm, sizes in (("standard", (1, 10, 100, 1000)), ("attnres-block", (1, 10, 100)))
        for size in sizes
        for seed in (0, 1)
    ]
    archive(tmp_path, "scaling", runs)
    with page.unpacked(tmp_path) as found:
        (row,) = page.curves.missed(found["scaling"]).splitlines()[2:]
        plain = next(
            curve for curve in page.curves.curves(found["scaling"]) if curve.residual == "standard"
        )
        three = [run for run in found["scaling"] if run.config["model"]["dim"] < 1000]
        assert page.curves.missed(three) == ""
    off = [float(cell.replace("−", "-")) for cell in row.strip("| ").split(" | ")[1:]]
    assert row.startswith("| `standard` |")
    assert off[2] == max(map(abs, off)) == pytest.approx(plain.miss, abs=5e-5)
    assert 0.02 < off[2] < 0.05
    assert sum(off) == pytest.approx(0, abs=2e-4)


def test_at_equal_time_an_arm_is_worth_what_it_saves_times_its_speed(page, tmp_path):
    """Half the compute, at three quarters of the speed."""
    widths = (128, 192, 256, 384)
    runs = [
        (arm, seed, 1 + (saved * width) ** -0.5, {"model.dim": width})
        for arm, saved in (("standard", 1), ("attnres-block", 2), ("never-timed", 3))
        for width in widths
        for seed in (0, 1)
    ]
    archive(tmp_path, "scaling", runs)
    sizes = ("ladder-2m", "ladder-7m", "ladder-16m", "ladder-43m")
    rates = {"standard": 4e5, "attnres-block": 3e5}
    speeds = {
        size: {arm: {"tokens_per_second": rate, "peak_gib": 2.5} for arm, rate in rates.items()}
        for size in sizes
    }
    with page.unpacked(tmp_path) as found:
        worth = page.curves.worth(found["scaling"], speeds).splitlines()
        text = page.curves.clock(found["scaling"], speeds)
        fits = page.curves.clocked(found["scaling"], speeds)
        pictures = page.pictures.scaling_pictures(found["scaling"], speeds)
        assert [file.name for file in page.pictures.scaling_pictures(found["scaling"], {})] == [
            "study-scaling.svg"
        ]
    assert "| 256 | `attnres-block` | 300 | 75 % | 2.5 | 1 | 1.0442 ± 0.0000 |" in text
    row = next(line for line in fits.splitlines() if line.startswith("| `attnres-block`"))
    assert row.count("1.50 (1.50 to 1.50)") == 4
    assert re.findall(r"Without width (\d+):", fits) == ["384", "128"]
    assert "never-timed" not in text + fits
    sides = ("compute, 7 million", "time, 7 million", "compute, 16 million", "time, 16 million")
    assert worth[0] == f"| 95 % intervals, not corrected | seeds | {' | '.join(sides)} |"
    twice, half_more, thrice = (
        f"**{value}** ({value} to {value})" for value in ("2.00", "1.50", "3.00")
    )
    assert (
        worth[2]
        == f"| `attnres-block` | 2, 2, 2, 2 | {twice} | {half_more} | {twice} | {half_more} |"
    )
    assert worth[3] == f"| `never-timed` | 2, 2, 2, 2 | {thrice} | - | {thrice} | - |"
    assert (
        "seconds that standard needs, as a ratio"
        in pictures[page.pictures.ASSETS / "study-clock.svg"]
    )


def test_an_arm_has_one_colour_and_one_name_in_all_panels(page, tmp_path):
    """Also beside one that has no curve, and so is in the panel of memory alone."""
    sizes = {"ladder-2m": 128, "ladder-7m": 192, "ladder-16m": 256}
    arms = {"a-beginner": 2, "mhc": 3, "muddformer": 3, "standard": 3}
    runs = [
        (arm, 0, 1 + (saved * width) ** -0.5, {"model.dim": width})
        for saved, (arm, count) in enumerate(arms.items(), 1)
        for width in [*sizes.values()][:count]
    ]
    archive(tmp_path, "scaling", runs)
    speeds = {
        size: {arm: {"tokens_per_second": 1e5, "peak_gib": width} for arm in arms}
        for size, width in sizes.items()
    }
    with page.unpacked(tmp_path) as found:
        drawn = page.pictures.scaling_pictures(found["scaling"], speeds)[
            page.pictures.ASSETS / "study-clock.svg"
        ]
    loss, _, memory = (
        {line.find("{*}text").text: line.get("class") for line in panel.findall("{*}g")}
        for panel in ElementTree.fromstring(drawn).findall("{*}g")
    )
    assert loss.keys() == {"mhc", "muddformer", "standard"}
    assert memory == loss | {"a-beginner": memory["a-beginner"]}
    assert len({*memory.values()}) == 4


def test_an_arm_that_was_timed_later_is_as_fast_beside_the_plain_one_as_it_was_there(
    page, tmp_path
):
    measured = [
        {"standard": 4e5, "mhc": 3e5, "failed": None},
        {"standard": 5e5, "muddformer": 2.5e5, "mhc": 1e5},
    ]
    for number, rates in enumerate(measured):
        arms = {
            arm: {"tokens_per_second": rate, "peak_gib": 2.0} if rate else {}
            for arm, rate in rates.items()
        }
        (tmp_path / f"{number}.json").write_text(
            json.dumps({"gpu": "NVIDIA H200", "ladder-7m": arms})
        )
    found = {
        arm: each["tokens_per_second"]
        for arm, each in page.curves.speeds(tmp_path)["ladder-7m"].items()
    }
    assert found == {"standard": 4e5, "mhc": 3e5, "muddformer": 2e5}
    assert list(page.curves.speeds(tmp_path)) == ["ladder-7m"]


@pytest.mark.parametrize("lacks", ["runs", "speeds"])
def test_without_the_plain_residual_at_three_sizes_there_are_rows_and_no_curves(
    page, tmp_path, lacks
):
    """It may have diverged at one, or not have been timed there."""
    widths = {"ladder-2m": 128, "ladder-7m": 192, "ladder-16m": 256}
    there = {"attnres-block": 3, "standard": 2}
    arms = [
        (arm, width)
        for arm, count in there.items()
        for width in [*widths.values()][: count if lacks == "runs" else 3]
    ]
    archive(
        tmp_path,
        "scaling",
        [(arm, 0, 1 + width**-0.5, {"model.dim": width}) for arm, width in arms],
    )
    speeds = {
        size: {
            arm: {"tokens_per_second": 1e5, "peak_gib": 1.0}
            for arm, count in there.items()
            if n < count
        }
        for n, size in enumerate(widths)
    }
    with page.unpacked(tmp_path) as found:
        runs = found["scaling"]
        assert (
            page.filled(CURVES, found)
            == CURVES.replace("\n", "\nThe curves need a third size.\n", 1)
        ) == (lacks == "runs")
        assert (page.curves.worth(runs, speeds) == page.curves.NO_CURVES) == (lacks == "runs")
        text = page.curves.clock(runs, speeds)
        assert page.curves.clocked(runs, speeds) == page.curves.NO_CURVES
        drawn = [file.name for file in page.pictures.scaling_pictures(runs, speeds)]
    assert "| 256 | `attnres-block` | 100 | - |" in text
    assert drawn == ([] if lacks == "runs" else ["study-scaling.svg"])


def test_tables_take_the_runs_of_other_recipes_that_are_at_the_settled_rate(page, tmp_path):
    runs = ((0, 8e-3, 1.5), (1, 8e-3, 1.5), (0, 1.1e-2, 1.4))
    archive(
        tmp_path,
        "rates",
        [("standard", seed, score, {"model.dim": 128, "optim.lr": lr}) for seed, lr, score in runs],
    )
    archive(tmp_path, "scaling", [("standard", 0, 1.3, {"model.dim": 256, "optim.lr": 6e-3})])
    text = "<!-- scaling:begin -->\n<!-- scaling:end -->"
    with page.unpacked(tmp_path) as found:
        made = page.filled(text, found)
    assert "| `standard` | 1 | 1.4000 | - |" in made
    assert "1.3000" in made
    assert "1.5000" not in made


def test_what_has_not_run_says_so(page, tmp_path):
    text = "<!-- query:begin -->\nold\n<!-- query:end -->\n<!-- other:begin -->\nkept\n<!-- other:end -->"
    with page.unpacked(tmp_path) as found:
        assert page.filled(text, found) == text.replace("old", "Not run yet.")


def of_sources(alike):
    """Weights of four reads, and changes in the same order or the other way round. Beside where sources stand, which
    the weights of the last two go with by 0.5 and by -0.2, they say all of it."""
    weights = [[1, 0, 0, 0], [1, 2, 0, 0], [2, 1, 3, 0], [1, 2, 3, 4]]
    return {
        "weights": weights,
        "changes": [[weight if alike else -weight for weight in row] for row in weights],
    }


def test_what_size_alone_says_of_importance_is_told_of_the_longest_text(page):
    """The two reads of three sources or more go with sizes of 2 (the embedding's, whose weight at the
    first read is a half), 1, 3 and 4 by -1 and by -0.8."""
    record = {"mixing": [[0.5]], "read_norm": [1.0, 9.0], "output_norm": [1.0, 3.0, 4.0]}
    run = SimpleNamespace(residual="attnres-full", seed=2, depth=[{}, record])
    measured = [
        {
            "residual": "attnres-full", "seed": 2, "windows": 1, "tokens": tokens, "spearman": {"all": 0.5},
            "sizes": 0.7, **of_sources(tokens < 64),
        }
        for tokens in (8, 64)
    ]  # fmt: skip
    assert page.tables.sizes(measured, [run]).splitlines()[2:] == [
        "| `attnres-full` | 1 | 0.50 | −0.90 | 0.70 |"
    ]


def test_what_scripts_measured_is_told_by_arm_with_the_spread_over_seeds(page, tmp_path):
    correlations = {"all": 0.5, "first": 0.1, "middle": None, "last": 0.9}
    runs = [
        {
            "residual": arm, "windows": 8, "tokens": tokens, "spearman": {**correlations, "all": value}, "sizes": 0.4,
            **of_sources(value < 0.7),
        }
        for arm, tokens, value in (
            ("denseformer", 64, 0.2), ("attnres-full", 512, 0.9), ("attnres-full", 64, 0.5), ("attnres-full", 64, 0.7),
        )
    ]  # fmt: skip
    (tmp_path / "importance.json").write_text(json.dumps(runs))
    text = page.tables.importance(page.tables.measured_in(tmp_path, "importance"))
    head = "all reads | first third | middle | last third | by place only | weight, beside place | weight times size"
    assert text.startswith(f"|  | tokens | seeds | {head} |\n")
    told = "0.60 ± 0.14 | 0.10 ± 0.00 | - | 0.90 ± 0.00 | 0.00 ± 0.21 | 0.00 ± 1.41 | 0.40 ± 0.00"
    assert f"| `attnres-full` | 512 | 2 | {told} |\n" in text
    assert text.splitlines()[-1].startswith("| `attnres-full` | 4096 | 1 | 0.90 |")
    assert "| `denseformer` | 512 | 1 | 0.20 | 0.10 | - | 0.90 | 0.15 | 1.00 | 0.40 |" in text
    (tmp_path / "hops").mkdir()
    for name, arm, accuracy in (
        ("a", "attnres-block", [1, 0.4]),
        ("b", "standard", [0.9, 0.1]),
        ("c", "standard", [1, 0.3]),
    ):
        (tmp_path / "hops" / f"{name}.json").write_text(
            json.dumps({"residual": arm, "accuracy": accuracy})
        )
    text = page.tables.hops(page.tables.measured_in(tmp_path, "hops"))
    assert text.startswith("|  | seeds | 1 | 2 |\n")
    assert (
        "| `standard` | 2 | 0.95 ± 0.07 | 0.20 ± 0.14 |\n| `attnres-block` | 1 | 1.00 | 0.40 |\n"
        in text
    )
    assert page.tables.measured_in(tmp_path, "nothing") == []


def test_the_answers_are_those_of_the_tables():
    """Intervals with four decimals, and the ratios of time, are in the tables as they are in the answers."""
    answers, appendix = (
        (STUDY.parent.parent / "docs" / "results" / name).read_text(encoding="utf-8")
        for name in ("study.md", "study-tables.md")
    )
    claims = re.findall(r"(−\d\.\d{4}) \| (−\d\.\d{4} to −\d\.\d{4})", answers)
    assert len(claims) == 4
    assert all(f"{difference} | {interval}" in appendix for difference, interval in claims)
    times = answers[answers.index("| time saved |") : answers.index("Does it grow or shrink")]
    ratios = re.findall(r"(\d\.\d\d)\*{0,2} (\(\d\.\d\d to \d\.\d\d\))", times)
    assert len(ratios) == 7
    assert all(f"{ratio} {interval}" in appendix for ratio, interval in ratios)
