import pytest


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
    # Before pytest is configured, as this file is read, nothing may import torch.
    from processes import Forked

    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
