"""The blocks of the guide `In your engine` run. `make test-engines`."""

import importlib.util
import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

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
    "DeepSpeed": "deepspeed",
    "Megatron-Core": "megatron",
    "Another engine": "headwater",
}


def prepare_deepspeed():
    import deepspeed

    # On a CPU DeepSpeed would first compile this operator, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prepare_megatron():
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()


PREPARE = {"DeepSpeed": prepare_deepspeed, "Megatron-Core": prepare_megatron}


@pytest.fixture
def one_rank(monkeypatch):
    """The environment of a process that a launcher has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in {**places, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("section", NEEDS)
def test_a_block_of_the_guide_runs(section, one_rank, tmp_path, monkeypatch):
    if importlib.util.find_spec(NEEDS[section]) is None:
        pytest.skip(f"{NEEDS[section]} is not installed here: make test-engines")
    monkeypatch.chdir(tmp_path)
    PREPARE.get(section, lambda: None)()
    names: dict[str, object] = {"__name__": "guide"}
    [block] = SECTIONS[section]
    exec(compile(block, str(GUIDE), "exec"), names)
    if section == "torchtitan":
        spec = names["llama3_with_block"]().model_spec
        assert spec.model.residual == "attnres-block:block=4"
    if section == "Megatron-Core":
        assert names["model"].decoder.residual.spec == "attnres-block:block=4"


def test_every_block_is_run():
    assert {section for section, blocks in SECTIONS.items() if blocks} == NEEDS.keys()
