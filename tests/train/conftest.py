import shutil
from pathlib import Path

import pytest
from processes import Forked
from tinyrun import tiny

from headwater.train.loop import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A tiny run that has ended, beside its corpus: Muon for the matrices, two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny(folder, optimizer="muon", keep=2), folder / "run")
    return folder / "run"


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of that run; its settings name the corpus of the first."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the processes of runs: `engine.append(f)` lets f(jobs, **options) act in their place."""
    acts = []

    def run_all(jobs, *_, **options):
        return (acts[0](jobs, **options) if acts else None) or {}

    monkeypatch.setattr("headwater.train.studies.run_all", run_all)
    return acts


@pytest.fixture
def forked(monkeypatch):
    """Lets the processes of runs be forks that have imported torch already."""
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
