"""The blocks of the guide `In your engine` run. `make test-engines`."""

import importlib.util
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "in-your-engine.md"
BLOCK = re.compile(r"^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTIONS = {
    section.partition("\n")[0]: BLOCK.findall(section)
    for section in GUIDE.read_text().split("\n## ")[1:]
}
NEEDS = {
    "torchtitan": "torchtitan",
    "Accelerate": "accelerate",
    "transformers' Trainer": "accelerate",
    "Lightning Fabric": "lightning",
    "Another engine": "headwater",
}


@pytest.mark.parametrize("section", NEEDS)
def test_a_block_of_the_guide_runs(section, tmp_path, monkeypatch):
    if importlib.util.find_spec(NEEDS[section]) is None:
        pytest.skip(f"{NEEDS[section]} is not installed here: make test-engines")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "guide"}
    [block] = SECTIONS[section]
    exec(compile(block, str(GUIDE), "exec"), names)
    if "llama3_with_block" in names:
        spec = names["llama3_with_block"]().model_spec
        assert spec.model.residual == "attnres-block:block=4"


def test_every_block_is_run():
    assert {section for section, blocks in SECTIONS.items() if blocks} == NEEDS.keys()
