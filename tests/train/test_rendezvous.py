"""Attempts of one torchrun know of each other over a store that outlives them; real ones are in
test_parallel_faults.py."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from tinyrun import changed, tiny

from headwater.errors import UserError
from headwater.train.distributed import rendezvous as attempts
from headwater.train.loop import accumulate, update
from headwater.train.run import begin, save


def test_ranks_meet_where_no_earlier_attempt_was():
    store, corners = dist.HashStore(), []
    dist.PrefixStore("headwater", store).add("numbers", 3)  # of workers that died waiting
    for attempt in range(2):
        with ThreadPoolExecutor() as pool:
            main, *others = pool.map(lambda rank: attempts.rendezvous(store, rank, 3), range(3))
        assert not main.check(["address"]), "an earlier attempt was here"
        main.set("address", str(attempt))
        assert [other.get("address") for other in others] == [str(attempt).encode()] * 2
        corners.append(main)
    assert [corner.get("address") for corner in corners] == [b"0", b"1"]
    with pytest.raises(UserError, match="only 1 of 2 ranks came within"):
        attempts.rendezvous(store, 0, 2, patience=0.1)


def launched(monkeypatch, store: dist.Store) -> None:
    # torchrun's default on several machines: no name to go by
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 0, 1)]))


def test_a_restart_goes_on_with_its_own_run_and_refuses_any_other(tmp_path, monkeypatch):
    """Torchrun adds no --resume; a count of restarts would not tell the two apart."""
    config, out = tiny(tmp_path), tmp_path / "run"
    store = dist.HashStore()
    launched(monkeypatch, store)
    # The first attempt dies before it has saved anything: the second finds its folder
    for at in range(2):
        run = begin(config, out, resume=False)
        assert run.step == 0, at
    update(run, 1, accumulate(run, 1))
    run.step = 1
    save(run)
    assert begin(config, out, resume=False).step == 1
    begin(config, tmp_path / "other", resume=False)  # a second run of the same launch

    before = (out / "config.json").read_bytes()
    launched(monkeypatch, dist.HashStore())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for _ in range(2):  # the first attempt of another torchrun, and its restart
        with pytest.raises(UserError, match="already holds a run"):
            begin(changed(config, seed=1), out, resume=False)
    assert (out / "config.json").read_bytes() == before
    assert begin(config, out, resume=True).step == 1
    assert json.loads(before)["train"]["seed"] == 0
    launched(monkeypatch, store)
    with pytest.raises(UserError, match="already holds a run"):
        begin(config, out, resume=False)  # which belongs to the other launch now


def test_a_process_that_nobody_starts_again_leaves_no_mark(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    begin(tiny(tmp_path), tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / attempts.MARK).exists()
