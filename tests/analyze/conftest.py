"""A comparison on disk, and its report."""

from pathlib import Path

import pytest
from runfolder import RESIDUALS, make_comparison

from headwater.analyze.report import write_report


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    return make_comparison(
        tmp_path_factory.mktemp("report") / "compare", RESIDUALS, [0, 1, 2], layers=6, steps=200
    )


@pytest.fixture(scope="module")
def written(comparison) -> Path:
    return write_report([comparison])
