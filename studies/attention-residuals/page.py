"""The tables of the study's two pages, from the raw runs in runs/: `python studies/attention-residuals/page.py`.

Needs no GPU. Each archive is a study's folder without weights, one for each recipe; a table whose archive is not there
says so. Differences are taken seed by seed between runs that share every setting but the residual's.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial

import curves
import pictures
import repeats
import tables
from records import HERE, Runs, finished, grid, left_out, taken, unpacked

PAGES = [HERE.parent.parent / "docs" / "results" / name for name in ("study.md", "study-tables.md")]
MARKS = re.compile(r"(<!-- ([a-z]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def cost(found: dict[str, Runs]) -> str:
    """Runs, tokens, and the GPU's minutes, which runs side by side cannot know themselves: minutes.json has them."""
    minutes = json.loads((HERE / "runs" / "minutes.json").read_text())
    rows, total = [], [0, 0, 0.0]
    for recipe, runs in ((recipe, finished(runs)) for recipe, runs in found.items()):
        tokens = sum(int(run.summary["tokens"]) for run in runs if run.summary)
        total = [total[0] + len(runs), total[1] + tokens, total[2] + minutes[recipe]]
        rows.append(
            [
                f"`{recipe}.toml`",
                str(len(runs)),
                f"{tokens / 1e6:.0f} million",
                f"{minutes[recipe]:.0f}",
            ]
        )
    if count := len(tables.measured_in(HERE / "runs", "hops")):
        total = [total[0] + count, total[1], total[2] + minutes["hops"]]
        rows.append(["`studies/hops`", str(count), "of its own", f"{minutes['hops']:.0f}"])
    rows.append(["all", str(total[0]), f"{total[1] / 1e6:.0f} million", f"{total[2]:.0f}"])
    return grid(["recipe", "runs", "tokens", "H200 minutes"], rows)


def importance_by_size(found: dict[str, Runs]) -> str:
    measured, runs = tables.measured_in(HERE / "runs", "importance"), found.get("importance")
    return tables.sizes(measured, runs) if measured and runs else "Not run yet.\n"


TABLES: dict[str, Callable[[Runs], str]] = {
    "noise": tables.noise, "rates": tables.rates, "query": tables.query, "transfer": tables.transfer,
    "ablations": tables.ablations, "longer": tables.ablations, "dynamics": tables.dynamics, "hybrid": tables.hybrid,
    "scaling": curves.scaling,
}  # fmt: skip
SWEEPS = ("rates", "hybrid", "query", "transfer")  # tables that show where a run fails
OF_ALL: dict[str, Callable[[dict[str, Runs]], str]] = {
    "source": importance_by_size, "four": lambda found: curves.beside_full(finished(found.get("importance", []))),
    "again": repeats.again, "repeats": repeats.repeats, "onset": repeats.onset, "sizes": curves.sizes, "cost": cost,
}  # fmt: skip
SPEEDS = curves.speeds()
OF_SCALING: dict[str, Callable[[Runs], str]] = {
    "worth": partial(curves.worth, speeds=SPEEDS), "clock": partial(curves.clock, speeds=SPEEDS),
    "clocked": partial(curves.clocked, speeds=SPEEDS), "beside": curves.beside_full, "lead": curves.lead,
    "curves": curves.fits, "missed": curves.missed, "without": curves.without_a_size,
    "fulls": partial(curves.fits, base=curves.FULL),
}  # fmt: skip
# Not by `headwater study`, but by scripts of their own.
MEASURED = {"importance": tables.importance, "hops": tables.hops, "copying": tables.copying}


def filled(text: str, found: dict[str, Runs]) -> str:
    """The page with every table as the runs have it now."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name in OF_ALL:
            made = OF_ALL[name](found)
        elif name in OF_SCALING:
            made = OF_SCALING[name](finished(taken("scaling", found))) or curves.NO_CURVES
        elif name in TABLES:
            runs = taken(name, found)
            ended = [run for run in runs if run.summary or (run.stopped and name in SWEEPS)]
            made = (TABLES[name](ended) if finished(runs) else "Not run yet.\n") + left_out(runs)
        elif name in MEASURED:
            measured = tables.measured_in(HERE / "runs", name)
            made = MEASURED[name](measured) if measured else "Not run yet.\n"
        else:
            return match[0]
        return f"{match[1]}{made}{match[3]}"

    return MARKS.sub(table, text)


def main() -> int:
    with unpacked(HERE / "runs") as found:
        for page in PAGES:
            before = page.read_text(encoding="utf-8")
            text = filled(before, found)
            page.write_text(text, encoding="utf-8")
            print(f"{page.name}: {'as it was' if text == before else 'written'}")
        for file, drawn in pictures.pictures(found).items():
            file.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
