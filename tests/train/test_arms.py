"""Arms of a comparison: residuals, with switches of the model."""

import re

import pytest
from tinyrun import changed, tiny

from headwater import cli
from headwater.cli.flags import CompareFlags
from headwater.cli.parser import parse
from headwater.errors import UserError
from headwater.residuals import names
from headwater.train import Config
from headwater.train.arms import parse_arm
from headwater.train.comparison import admit, planned


def test_all_means_every_registered_name_and_each_is_taken_once():
    def expand(*residuals: str) -> list[str]:
        return admit(Config(), residuals, [0])[0]

    everything = expand("all")
    assert everything[0] == "standard"
    assert sorted(everything) == sorted(names())
    spellings = ["attnres-block:block=2,heads=2", "attnres-block:heads=2,block=2"]
    mixed = expand("attnres-full", "all", *spellings)
    assert mixed[:2] == ["attnres-full", "standard"]
    assert sorted(mixed) == sorted([*names(), spellings[0]])
    arms = ["standard+shortswa=4+qk_norm=true", "standard+qk_norm=True+shortswa=4"]
    assert expand("standard", "standard:", *arms) == ["standard", arms[0]]


def test_an_arm_is_a_residual_with_switches_of_the_model(tmp_path):
    config = tiny(tmp_path)
    text = "depth-window:window=2+shortswa=4+value_residual=true+rope_theta=1e+3"
    switches = {"shortswa": 4, "value_residual": True, "rope_theta": 1000.0}
    assert parse_arm(text).switches == switches
    run = planned(config, text, 1)
    assert run.config == changed(config, residual="depth-window:window=2", seed=1, **switches)
    assert run.arm == text
    assert planned(config, "depth-window:window=2", 1).arm == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("standard+shortswa", "unknown residual 'standard+shortswa'"),
        ("standard+context=64", "'context' is no setting that an arm may change; Valid: "),
        ("standard+shortswa=four", "shortswa"),
        ("standrad+shortswa=4", "unknown residual 'standrad'"),
        ("attnres-full:block=2+shortswa=4", "has no option 'block'"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_arm(text)


def test_arms_are_another_word_for_residuals():
    argv = ["--arms", "standard", "standard+shortswa=4", "--seeds", "0"]
    assert parse(CompareFlags, argv, cli.compare).residuals == ("standard", "standard+shortswa=4")
