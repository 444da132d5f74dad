"""The schema of settings: bounds, types, files over defaults, sizes of models, and what errors say."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from tinyrun import changed

from headwater.errors import SettingError, UserError, as_flag, command, spell, spelling
from headwater.models import SIZES, ModelConfig
from headwater.runs.settings import SECTIONS, SETTINGS, Config, load_file
from headwater.train import DataSettings, OptimSettings, TrainSettings


def section_with(name: str, value):
    """The section of a setting, made with this value of it."""
    section, _, key = name.partition(".")
    return SECTIONS[section](**{key: value})


BOUNDED = [name for name, marks in SETTINGS.items() if marks.bounds()]


@pytest.mark.parametrize("name", BOUNDED)
def test_each_bound_holds_at_its_value_and_not_beyond(name):
    marks = SETTINGS[name]
    default = Config().flat()[name]
    whole = isinstance(default, int | None)
    # A model's numbers depend on each other.
    if marks.least is not None and not name.startswith("model."):
        section_with(name, marks.least)
    for bound, direction in ((marks.least, -1), (marks.most, 1)):
        if bound is not None:
            step = 1 if whole else max(1e-3, bound)
            value = bound + direction * step
            with pytest.raises(SettingError, match=f"{name} must be .*at (least|most)"):
                section_with(name, value)
    for bound in (marks.above, marks.below):
        if bound is not None:
            with pytest.raises(SettingError, match=f"{name} must be .*(above|below) {bound}"):
                section_with(name, float(bound))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataSettings(source="my.txt"), "data.source must be a list, each a string"),
        (lambda: TrainSettings(steps=np.float64(3)), "train.steps must be an integer; got 3.0"),
        (lambda: TrainSettings(steps=True), "train.steps must be an integer; got True"),
        (lambda: TrainSettings(graph=1), "train.graph must be true or false; got 1"),
        (lambda: OptimSettings(lr=float("nan")), "optim.lr must be a finite number"),
        (lambda: OptimSettings(optimizer="sgd"), "optim.optimizer must be 'adamw' or 'muon'"),
        (lambda: TrainSettings(batch_size=6, accumulate=4), "train.batch_size must be a multiple"),
        (lambda: ModelConfig(heads=3), "model.heads must divide dim"),
        (lambda: ModelConfig(kv_heads=3), "model.kv_heads must divide heads"),
        (lambda: ModelConfig.named("nanoo"), "model.size must .* did you mean 'nano'"),
    ],
)
def test_an_impossible_setting_is_refused_where_it_is_made(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_lists_whole_numbers_and_numpy_become_what_a_setting_is():
    train = {"steps": np.int64(3), "graph": np.bool_(True), "init_from": np.str_("there")}
    swept = {"lr": np.float32(0.5), "clip": 2, "cuts": [np.int64(2), 4], **train}
    plain = {
        "steps": 3,
        "graph": True,
        "init_from": "there",
        "lr": 0.5,
        "clip": 2.0,
        "cuts": (2, 4),
    }
    ours, expected = changed(Config(), **swept), changed(Config(), **plain)
    assert json.dumps(asdict(ours)) == json.dumps(asdict(expected))


def test_a_file_goes_over_defaults_and_a_saved_configuration_is_read_back(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[optim]\nlr = 1\n[data]\nsource = ["a", "b"]\n[model]\nsize = "deep"\nlayers = 3\n'
    )
    config = load_file(tmp_path / "run.toml")
    assert (config.optim.lr, config.data.source) == (1.0, ("a", "b"))
    assert config.model == ModelConfig.named("deep", layers=3)
    assert config.train == Config().train
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    assert load_file(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nwarmpu = 3", "unknown setting optim.warmpu; did you mean 'warmup'?"),
        ("[optm]\nlr = 3", "unknown section 'optm'; did you mean 'optim'?"),
        ("lr = 3", "it stands under [optim]"),
        ("[train]\nwarmup = 3", "unknown setting train.warmup; it stands under [optim]"),
        ("[train]\nsteps = 1.5", "train.steps must be an integer; got 1.5"),
        ("[train]\nsteps = ", "cannot read the configuration"),
    ],
)
def test_a_bad_file_is_named_with_its_setting(tmp_path, text, message):
    (tmp_path / "bad.toml").write_text(text)
    with spelling(as_flag), pytest.raises(UserError) as caught:
        load_file(tmp_path / "bad.toml")
    assert "bad.toml: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("former", SIZES)
def test_a_size_is_the_size_whatever_model_it_goes_over(former):
    others = {"vocab_size": 512, "norm_eps": 1e-3, "qk_norm": True}  # unless the size names them
    model = ModelConfig.named(former, **others)
    for size, shape in SIZES.items():
        assert model.over({"size": size}) == ModelConfig(**{**others, **shape})
        assert model.over({"size": size, "mlp_dim": 480}).mlp_dim == 480


def test_a_setting_is_spelled_for_its_reader():
    error = SettingError("train.batch_size", "must be at least 1", 0)
    assert str(error) == "train.batch_size must be at least 1; got 0"
    assert spell("train.graph", False) == "train.graph = false"
    with spelling(as_flag):
        assert str(error) == "--batch-size must be at least 1; got 0"
        assert spell("train.graph", False) == "--no-graph"
        assert spell("optim.lr", 0.001) == "--lr 0.001"
    words = command("train", out="a b", resume=True, seeds=(0, 1), plugin=["c", "d"], config=None)
    assert words == "headwater train --out 'a b' --resume --seeds 0 1 --plugin c --plugin d"


def test_marks_cover_what_does_not_change_a_run():
    """Settings that a run may be resumed with: the rest of the package reads these marks."""
    effects = {name: marks.changes for name, marks in SETTINGS.items()}
    assert effects["train.save_every"] == effects["log.wandb"] == "records"
    assert effects["train.compile"] == "rounding"
    assert effects["train.seed"] == effects["model.dim"] == "numbers"
    assert SETTINGS["optim.query_lr"].felt_by == "queries"
    assert SETTINGS["train.skip_spikes"].resumable
    assert changed(Config(), steps=7).flat()["train.steps"] == 7
