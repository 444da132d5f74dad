"""A comparison: several arms, residuals as a rule, by several seeds on equal tokens, with one table.

It is a study of two lists, arms and seeds, and runs on the same engine. Runs with the same seed see the same batches in
the same order, so their losses are compared in pairs. The folder is the state: finished runs are kept, unfinished ones
resume.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headwater.errors import UserError, command, spell
from headwater.folders import at_home
from headwater.runs.files import read_object
from headwater.runs.launch import most_at_a_time, read_launch
from headwater.runs.record import COMPARISON
from headwater.runs.results import CompareResult, TrainResult
from headwater.runs.settings import TOKENIZERS, Config
from headwater.runs.tables import print_table
from headwater.schema import plain
from headwater.train.arms import parse_arm
from headwater.train.data.dataset import Dataset
from headwater.train.data.tokenizer import kept_tokenizer
from headwater.train.differences import OUTER, differences
from headwater.train.files import locked, refuse_others, write_json
from headwater.train.jobs import Job, plugin_for, refuse_failures
from headwater.train.recipes import PlannedRun, prepared
from headwater.train.studies import carry_out, place, plugins_of
from headwater.train.table import table_of, tabulate

# What a step that is not finite has stopped may go on without it.
FREE = OUTER | {"train.skip_nonfinite", "train.skip_spikes", "train.spike_sigmas"}


def compare(
    config: Config,
    out: str | Path,
    *,
    residuals: Sequence[str],
    seeds: Sequence[int],
    jobs: int = 1,
    resume: bool = False,
    progress: bool = True,
) -> CompareResult:
    """Train several residuals with several seeds on equal tokens; what `headwater compare` calls.

    Each run is a process of its own, so that this works from a script and from a notebook alike.

    Arguments:
        config: the settings that all runs share; residual and seed are set for each run.
        out: folder of the comparison: table.json, and under runs/ a folder for each run, which `load_run` takes.
        residuals: specifications such as "attnres-block:block=4", the baseline first; "all" is every registered one.
            Settings of the model may follow, which makes other arms of them: "standard+shortswa=4".
        seeds: seeds of the initial weights and the order of the data; runs of one seed are compared in pairs.
        jobs: runs at a time; the cores are shared among them.
        resume: keep what is finished in `out`, continue what is not, and add the residuals and seeds that are new.
        progress: show how far the runs are, and the table at the end.

    Returns: a `CompareResult`: `.rows`, one for each residual, and `.runs`, a `TrainResult` for each finished run.

    Raises: `headwater.errors.UserError` if arguments or folder do not fit (before anything is run), or after all runs
        have ended if one of them failed: the others are kept, table.json is written, and `resume=True` tries again.
        `headwater.errors.Interrupted` after Ctrl-C, when every run has been saved.

        result = compare(Config(), "runs/pair", residuals=["standard", "attnres-block"], seeds=[0, 1], jobs=2)
        print(result.rows[1].difference.mean)
    """
    console, out = Console(quiet=not progress), at_home(out)
    jobs = plain(jobs)
    arms, seeds = admit(config, residuals, plain(seeds))
    if not (out / COMPARISON).exists():
        if resume:
            raise UserError(f"there is no comparison at {out} to resume")
        refuse_others(out, "a comparison", known=("settings.json", "settings"))
    with locked(out):
        # Where the text's tokenizer is gone, the copy that the comparison keeps serves.
        config = replace(config, data=kept_tokenizer(config.data, out))
        prepared.cache_clear()
        data = prepared(config.data)
        arms, seeds = merge_with_saved(config, out, arms, seeds, data, resume=resume)
        # The first seed of every arm runs before the second of any.
        runs: dict[tuple[str, int], PlannedRun] = {}
        for seed in seeds:
            runs |= {(arm, seed): planned(config, arm, seed) for arm in arms}
        jobs_of_runs = place(list(runs.values()), out, keep_weights=True)
        placed = dict(zip(runs, jobs_of_runs, strict=True))
        # Each result is shown with its difference to the baseline of its seed.
        for (arm, seed), job in list(placed.items()):
            if arm != arms[0]:
                placed[arm, seed] = replace(job, baseline=placed[arms[0], seed].folder)
        # Arms that compute the same share a folder, which is filled once.
        by_folder: dict[Path, Job] = {}
        for job in placed.values():
            by_folder.setdefault(job.folder, job)
        save(config, out, arms, seeds, data)
        go_on = command("compare", out=out, plugin=plugins_of(runs.values()), resume=True)
        failures = carry_out(
            list(by_folder.values()),
            out,
            jobs,
            console,
            go_on=go_on,
            table=lambda: result_of(placed, arms, out).table(),
        )
        result = result_of(placed, arms, out)
        print_table(table_of(result.rows, config.train.steps), console)
    refuse_failures(failures, len(runs), f"Mend the cause and go on with: {go_on}")
    return result


def planned(config: Config, text: str, seed: int) -> PlannedRun:
    """The run of an arm with a seed."""
    arm = parse_arm(text)
    settings = arm.apply(config)
    settings = replace(settings, train=replace(settings.train, seed=seed))
    # The name of a run without switches is its residual, which its settings have.
    return PlannedRun(f"{text}-seed{seed}", settings, arm=text if arm.switches else "")


def result_of(jobs: dict[tuple[str, int], Job], arms: Sequence[str], out: Path) -> CompareResult:
    """The table of the runs that are finished."""
    finished = {}
    for key, job in jobs.items():
        if job.finished:
            finished[key] = TrainResult.read(job.folder)
    # Seconds of runs that shared the machine are not comparable: the table says so.
    side_by_side = {}
    for arm in arms:
        folders = [run.folder for (name, _), run in finished.items() if name == arm]
        counts = [read_launch(folder).side_by_side for folder in folders]
        side_by_side[arm] = most_at_a_time(counts)
    rows = tabulate(finished, arms, side_by_side)
    return CompareResult(folder=out, rows=rows, runs=tuple(finished.values()))


def admit(
    config: Config, residuals: Sequence[str], seeds: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Check the arguments, spell out `all` and drop repetitions. The first arm is the baseline."""
    from headwater.residuals import names

    if not residuals or not seeds:
        must = f"{spell('residuals')} and {spell('seeds')} need at least one value each"
        raise UserError(f"{must}; residuals: {', '.join(names())}, or all")
    # `all` is spelled out, and the first arm is what the others are compared with.
    arms: list[str] = []
    for entry in residuals:
        arms += names() if entry == "all" else [entry]
    arms = distinct(arms)
    # A residual of a script cannot run in another process.
    for arm in arms:
        plugin_for(parse_arm(arm).residual)
    numbers = [replace(config.train, seed=seed).seed for seed in seeds]  # checks their bounds
    return arms, list(dict.fromkeys(numbers))


def distinct(arms: Sequence[str]) -> list[str]:
    """Each arm once, under the first of its spellings."""
    # Two spellings of one arm would count as two residuals.
    first: dict[Hashable, str] = {}
    for text in arms:
        first.setdefault(parse_arm(text).identity, text)
    return list(first.values())


def merge_with_saved(
    config: Config,
    out: Path,
    arms: list[str],
    seeds: list[int],
    data: Dataset,
    *,
    resume: bool,
) -> tuple[list[str], list[int]]:
    """The arms and seeds that the folder is to hold: on resuming, what it held and then what is new.

    Raises UserError if the folder holds a comparison, and it is not to be resumed or has other settings or text.
    """
    path = out / COMPARISON
    if not path.exists():
        return arms, seeds
    if not resume:
        advice = f"continue it with {spell('resume', True)}, or choose another {spell('out')}"
        raise UserError(f"{out} already holds a comparison: {advice}")
    # Runs on other settings or another text would be compared with unlike runs.
    saved = read_object(path)
    settings = {**asdict(config), "corpus": data.identity}
    listing = differences({**saved["config"], "corpus": saved["corpus"]}, settings, FREE)
    if listing:
        details = "\n  ".join(listing)
        raise UserError(
            f"{out} holds a comparison with other settings, or on other text:\n  {details}\nTake back the change, or "
            f"choose another {spell('out')}"
        )
    all_seeds = dict.fromkeys(saved["seeds"] + seeds)
    return distinct(saved["residuals"] + arms), list(all_seeds)


def save(config: Config, out: Path, arms: list[str], seeds: list[int], data: Dataset) -> None:
    """Write what the comparison is: its arms and seeds, its settings, and the tokenizer that it made."""
    # The place that it came from may be gone when the comparison goes on.
    if config.data.tokenizer not in TOKENIZERS:
        data.tokenizer.save(out)
    settings = asdict(config)
    write_json(out / "settings.json", settings)
    # Resuming holds its settings and text against these.
    values: dict[str, Any] = {"residuals": arms, "seeds": seeds, "corpus": data.identity}
    write_json(out / COMPARISON, {**values, "config": settings})
