import shutil
from pathlib import Path

import pytest
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
