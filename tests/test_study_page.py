"""The study's tables are made from raw runs: of those in the repository as they are, and of a few made here."""

import json
import statistics
import tarfile
from pathlib import Path

import pytest

from headwater.stats import t_quantile

STUDY = Path(__file__).parent.parent / "studies" / "attention-residuals"


@pytest.fixture(scope="module")
def page(script):
    return script("studies/attention-residuals/page.py")


def archive(folder, recipe, runs):
    """`runs`: residual, seed, bits per byte, and further settings of the configuration."""
    root = folder / recipe
    for number, (residual, seed, score, further) in enumerate(runs):
        run = root / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        config = {"model": {"residual": residual, "dim": 8, "layers": 2}, "optim": {"lr": 1e-3, "query_lr": 1.0}}
        for name, value in further.items():
            section, key = name.split(".")
            config[section][key] = value
        summary = {"bits_per_byte": score, "flops_per_token": 10, "tokens": further.get("model.dim", 1) * 1000}
        (run / "config.json").write_text(json.dumps({**config, "train": {"seed": seed}}))
        (run / "metrics.jsonl").write_text("")
        (run / "summary.json").write_text(json.dumps({**summary, "residual": residual, "seed": seed}))
    with tarfile.open(folder / f"{recipe}.tar.xz", "w:xz") as packed:
        packed.add(root, recipe)


def test_the_page_is_what_the_raw_runs_give(page):
    with page.unpacked(STUDY / "runs") as found:
        assert found["noise"]
        text = page.PAGE.read_text()
        assert page.filled(text, found) == text
        plain = [page.score(run) for run in found["noise"] if run.residual == "standard"]
    assert f"| `standard` | {len(plain)} | {statistics.fmean(plain):.4f} | {statistics.stdev(plain):.4f} |" in text


def test_noise_is_told_in_pairs_with_what_more_seeds_would_tell(page, tmp_path):
    scores = {"standard": [1.50, 1.52, 1.51], "attnres-block": [1.46, 1.47, 1.48]}
    runs = [(arm, seed, score, {}) for arm, values in scores.items() for seed, score in enumerate(values)]
    archive(tmp_path, "noise", runs)
    with page.unpacked(tmp_path) as found:
        text = page.noise(found["noise"])
    differences = [-0.04, -0.05, -0.03]
    half = t_quantile(0.05, 2) * statistics.stdev(differences) / 3**0.5
    low, high = (page.signed(-0.04 + side * half) for side in (-1, 1))
    assert f"| `attnres-block` | 3 | 1.4700 | 0.0100 | −0.0400 | {low} to {high} | lower |" in text
    assert f"| 4 | {t_quantile(0.05, 3) * 0.01 / 2:.4f} |" in text


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
        text = page.rates(found["rates"])
    assert "Width 8, 2 layers:" in text
    assert "| 0.002 | **1.5050 ± 0.0071** | 1.5050 ± 0.0071 |" in text
    assert "| 0.004 | 1.5550 ± 0.0071 | **1.4050 ± 0.0071** |" in text
    assert text.endswith("not yet known, for: attnres-block.\n")


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
        row = next(line for line in page.scaling(found["scaling"]).splitlines() if "attnres" in line)
    assert row.count("2.00 (2.00 to 2.00)") == 4


def test_what_has_not_run_says_so(page, tmp_path):
    text = "<!-- query:begin -->\nold\n<!-- query:end -->\n<!-- other:begin -->\nkept\n<!-- other:end -->"
    with page.unpacked(tmp_path) as found:
        assert page.filled(text, found) == text.replace("old", "Not run yet.")
