"""The runs that the page is made of: unpacked, chosen, grouped, and written as rows of a table."""

import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.analyze.plot import ARMS
from headwater.runs.identity import label_of
from headwater.runs.record import RecordedRun, find_runs, read_run
from headwater.runs.tables import Table, markdown

HERE = Path(__file__).parent
BASELINE = "standard"
MAPPED = 8e-3  # the learning rate whose depth weights are drawn, and of whose runs the table of magnitudes takes more
# README.md's learning rates of the scaling, by width
RULE = {128: 1.1e-2, 192: 8e-3, 256: 6e-3, 384: 4e-3}
# Of arms whose best is another
OWN = {"completep": {128: 2.4e-2, 192: 1.6e-2, 256: 1.2e-2, 384: 8e-3}}
EARLY, LATER, STEPS = 500, 1000, 1472  # evaluations of the smallest size, and all its steps
Runs = list[RecordedRun]


@contextmanager
def unpacked(archives: Path) -> Iterator[dict[str, Runs]]:
    """The runs of every archive, by recipe, with those that have no result."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for archive in sorted(archives.glob("*.tar.xz")):
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            recipe = archive.name.removesuffix(".tar.xz")
            found[recipe] = [read_run(run) for run in find_runs([Path(folder) / recipe])]
        yield found


def finished(runs: Sequence[RecordedRun]) -> Runs:
    return [run for run in runs if run.summary]


def left_out(runs: Sequence[RecordedRun]) -> str:
    """A line on runs without a result: a mean over seeds that did not diverge speaks of those alone."""
    names = []
    for run in runs:
        if not run.summary:
            reason = f" ({run.stopped})" if run.stopped else ""
            names.append(f"`{label_of(run.name)}`{reason}")
    return f"\nWithout a result, so not in the table: {'; '.join(names)}.\n" if names else ""


def setting(run: RecordedRun, name: str) -> Any:
    """Of its configuration, such as optim.lr; a residual without the module that it comes from."""
    if name == "model.residual":
        return run.residual
    section, key = name.split(".")
    return run.config[section][key]


def score(run: RecordedRun) -> float:
    assert run.summary is not None
    return float(run.summary["bits_per_byte"])


def grouped(runs: Sequence[RecordedRun], *names: str) -> dict[tuple[Any, ...], Runs]:
    """Runs by the values of these settings, in order."""
    groups: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for run in runs:
        groups[tuple(setting(run, name) for name in names)].append(run)
    return dict(
        sorted(
            groups.items(), key=lambda item: [(value != BASELINE, value or 0) for value in item[0]]
        )
    )


def by_seed(runs: Sequence[RecordedRun]) -> dict[int | None, float]:
    return {run.seed: score(run) for run in runs}


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(Table(head, rows))


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def at_step(run: RecordedRun, step: int) -> float | None:
    return next((row["bits_per_byte"] for row in run.evals if row["step"] == step), None)


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


# Which runs of which recipes a table takes, if not all of those of its name alone.
TAKES: dict[str, dict[str, Callable[[RecordedRun], bool]]] = {
    "dynamics": {
        "noise": bool,
        "rates": lambda run: setting(run, "optim.lr") == MAPPED,
        "dynamics": bool,
    },
    "rates": {  # the arm that was taken in last began at the rates of the scaling
        "rates": bool,
        "scaling": lambda run: (
            run.residual == "muddformer:norm=true" and setting(run, "model.dim") < 256
        ),
    },
    "scaling": {
        "rates": lambda run: (
            setting(run, "optim.lr") == OWN.get(run.residual, RULE)[setting(run, "model.dim")]
        ),
        "scaling": bool,
    },
}


def coloured(runs: Runs) -> Runs:
    return [run for run in finished(runs) if run.residual in ARMS]


def taken(name: str, found: dict[str, Runs]) -> Runs:
    """The runs that a table takes, with those that have no result."""
    takes = TAKES.get(name, {name: bool})
    return [run for recipe, wanted in takes.items() for run in found.get(recipe, []) if wanted(run)]
