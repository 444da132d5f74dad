"""The benchmark of generation, at a size that a CPU runs: every arm is there, and wrong logits or a limit show."""

import pytest
import torch

from benchmarks import generate
from benchmarks.generate import ARMS, Bench, Out
from headwater.generation.captured_step import CapturedSteps


@torch.no_grad()
def test_every_arm_is_timed():
    bench = Bench("tiny", "cpu", 600, 1)
    found = dict(generate.decode(bench))
    assert {"batch 1", "batch 3"} < set(found)
    assert all(found["batch 3"][arm]["ms"] > 0 for arm in ARMS)
    assert all(values["ms"] > 0 for values in dict(generate.prefill(bench))["prompt 16"].values())
    assert set(dict(generate.memory(bench))["block"]) == {"bytes_after_3", "bytes_after_24"}
    assert dict(generate.peak(bench))["block, chunks of 4"]["bank_gib"] > 0
    bench.sizes = bench.sizes | {"batches": (1,)}
    assert set(dict(generate.hf(bench))) == {"transformers, batch 1", "llama, batch 1"}


@torch.no_grad()
def test_wrong_logits_show_no_time(monkeypatch):
    monkeypatch.setattr(generate, "GATE", -1.0)
    found = next(
        value for name, value in generate.decode(Bench("tiny", "cpu", 600, 1)) if name == "batch 1"
    )
    assert "ms" not in found["block"]
    assert "off by" in found["block"]["refused"]


def test_a_limit_ends_a_part():
    with pytest.raises(Out):
        list(generate.depth(Bench("tiny", "cpu", -1.0, 1)))


@torch.no_grad()
def test_wrong_logits_of_a_replay_show_no_time(monkeypatch):
    real = CapturedSteps.run
    monkeypatch.setattr(CapturedSteps, "run", lambda self: real(self) + (self.count == 2))
    found = next(
        value for name, value in generate.decode(Bench("tiny", "cpu", 600, 1)) if name == "batch 1"
    )
    assert "ms" not in found["block"]
