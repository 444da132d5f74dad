"""The engine of many runs: their folders, what is missing of them, and `study`, which runs a recipe.

A run's folder is named after its settings and a hash of all that count and of its text (headwater.runs.identity), so
what is there counts, and is never made twice. Weights are dropped when a run is finished, unless the recipe says
`keep_weights = true`: metrics, settings and summary stay, which is what reports and fits are made of. `compare` runs on
the same engine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headwater.errors import SettingError, UserError, command, dotted, spelling
from headwater.folders import at_home
from headwater.models.config import ModelConfig
from headwater.residuals.parameter_groups import sort_parameters
from headwater.residuals.registry import suspected
from headwater.runs.files import read_object
from headwater.runs.identity import HASHES, digits_of, folder_of, identity, slug
from headwater.runs.record import COMPARISON, CONFIG, SUMMARY
from headwater.runs.results import DIVERGED, TrainResult
from headwater.runs.settings import Config, flatten
from headwater.runs.tables import printable
from headwater.train.data.dataset import Dataset
from headwater.train.differences import FREE, OUTER, TEXT, differences
from headwater.train.files import locked, refuse_others, write_json
from headwater.train.jobs import Job, plugin_for, refuse_failures, run_all
from headwater.train.optim import ends_in_warmup
from headwater.train.recipes import PlannedRun, model_of, prepared, read_recipe

TABLE = "table.json"


@dataclass(frozen=True)
class StudyResult:
    """The standing of a study: `finished` runs by the name of their folder, and those that `diverged` or are `left`.

    `seconds` is an estimate for what is left, None before any run has finished.
    """

    folder: Path
    finished: dict[str, TrainResult]
    left: tuple[str, ...]
    seconds: float | None
    diverged: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """The rows as table.json has them: the name of each finished run, its settings and its result."""
        rows = []
        for name, run in self.finished.items():
            settings, summary = read_object(run.folder / CONFIG), read_object(run.folder / SUMMARY)
            rows.append({"run": name, **settings, **summary})
        return rows


def study(
    recipe: str | Path,
    out: str | Path | None = None,
    *,
    minutes: float = math.inf,
    whole: bool = False,
    progress: bool = True,
) -> StudyResult:
    """Run what is missing of a study; what `headwater study` calls.

    Arguments:
        recipe: a TOML file: `name`, settings that all runs share under [config], tables [[runs]] with lists of others.
        out: folder of the study, by default runs/ and its name: table.json, and under runs/ a folder for each run.
            `headwater report` and `headwater scaling` take it.
        minutes: no run is started after them, and those under way are saved: the next call goes on from there.
        whole: start no run that would not end in those minutes, judging by those that have ended, but a shorter one
            instead: for a machine whose disk is lost.
        progress: show how far the runs are.

    Returns a `StudyResult`. A run that diverged is a result as well, and is not repeated unless its settings change or
    its folder is removed. Raises `headwater.errors.UserError` for a file that does not fit, for a run whose folder was
    changed, and, after all others have ended, for runs that failed.

        study("studies/noise/recipe.toml", minutes=20)
    """
    began = time.monotonic()
    # Names and messages may have [brackets], which rich would take for markup.
    console = Console(quiet=not progress, markup=False, highlight=False)
    # Messages name settings as recipes do.
    with spelling(dotted):
        plan = read_recipe(at_home(recipe))
        go_on = command("study", recipe, out=out, plugin=plugins_of(plan.runs))
        folder = Path("runs") / slug(plan.name) if out is None else at_home(out)
        begun = any((folder / "runs").glob(f"*/{CONFIG}"))
        if (folder / COMPARISON).exists() or not begun:
            refuse_others(folder, "a study", known=("settings", "runs", TABLE))
        with locked(folder):
            placed = place(plan.runs, folder, keep_weights=plan.keep_weights)
            jobs = list(dict.fromkeys(placed))  # of settings that nothing feels, one run is enough
            result = standing(folder, jobs, plan.jobs)
            say_how_it_stands(console, result, jobs)
            failures = carry_out(
                [job for job in jobs if not job.diverged],
                folder,
                plan.jobs,
                console,
                go_on=go_on,
                seconds=60 * minutes - (time.monotonic() - began),  # text may take minutes
                whole=whole,
                table=lambda: standing(folder, jobs, plan.jobs).table(),
            )
            # The table is written; say again how it stands if that has changed.
            before, result = result, standing(folder, jobs, plan.jobs)
        # A run that diverged is a result of the study, and no failure.
        for job in jobs:
            if job.diverged and job.label in failures:
                console.print(printable(failures.pop(job.label)), soft_wrap=True)
        if describe(result) != describe(before):
            console.print(printable(describe(result)), soft_wrap=True)
        # Whoever set a limit of minutes is told how to go on.
        if result.left and not failures and 0 < minutes < math.inf:
            why = "would end in" if whole else "is begun after"
            words = f"no other run {why} the {minutes:g} minutes; go on with: {go_on}"
            console.print(words, soft_wrap=True)
        advice = f"Settings are those of {recipe}; the same command tries again what failed"
        refuse_failures(failures, len(jobs), advice)
    return result


def plugins_of(runs: Iterable[PlannedRun]) -> list[str]:
    """Modules that the processes of these runs import for their residuals."""
    # Each module once, in the order of runs.
    modules = [plugin_for(run.config.model.residual) for run in runs]
    return list(dict.fromkeys(module for module in modules if module))


def place(runs: Sequence[PlannedRun], out: Path, *, keep_weights: bool) -> list[Job]:
    """The job of each run, in its folder; writes the files of their settings. Runs that compute the same share one.

    Raises UserError before anything runs: for a model or a text that does not fit, and for a folder whose run is not
    what its name says.
    """
    jobs: dict[str, Job] = {}
    placed = []
    for run in runs:
        data = prepared_for(run)
        unfelt = unfelt_settings(run.config, data)
        # The folder's name says what the run computes.
        digits = identity_of(resolved(run.config, data), data.identity, unfelt)
        if digits not in jobs:
            jobs[digits] = Job(
                label=run.label,
                folder=folder_of(out / "runs", run.label, digits),
                config=run.config,
                arm=run.arm,
                corpus=data.identity,
                work=operations(run.config, data),
                keep_weights=keep_weights,
            )
        placed.append(jobs[digits])
    # Nothing is written before all of this is known to be right.
    refuse_changed(jobs.values())
    for job in jobs.values():
        (out / "settings").mkdir(exist_ok=True, parents=True)
        write_json(job.settings, asdict(job.config))
        retry_with_other_limits(job)
    return placed


def prepared_for(run: PlannedRun) -> Dataset:
    """The text of a run, once it is known that model and text fit."""
    try:
        with suspected(run.config.model.residual):
            data = prepared(run.config.data)
            model = model_of(run.config, data)
        data.check_length(model.config.context)
        return data
    except UserError as error:
        raise UserError(f"run {run.label} does not fit: {error}") from None


def resolved(config: Config, data: Dataset) -> dict[str, Any]:
    """Settings as the config.json of a run has them: the model with all that its size says."""
    from headwater.train.run import resolve_model

    return {**asdict(config), "model": resolve_model(config.model, data).to_dict()}


def unfelt_settings(config: Config, data: Dataset) -> frozenset[str]:
    """Settings that change nothing in a run: a factor on the rate of queries, if the residual has no queries."""
    if sort_parameters(model_of(config, data))["queries"]:
        return frozenset()
    return frozenset({"optim.query_lr"})


def identity_of(
    settings: Mapping[str, Any], corpus: Mapping[str, Any], unfelt: frozenset[str]
) -> str:
    """Hash of the settings that count and of the text.

    Settings at their defaults are left out, so that a setting which a later version adds gives no run another name.
    """
    # The text counts by its hash, not by its name or place.
    ignored = FREE | TEXT | unfelt
    counted = {}
    for key, value in flatten(dict(settings)).items():
        is_default = key in DEFAULTS and DEFAULTS[key] == value
        if key not in ignored and not is_default:
            counted[key] = value
    return identity(counted, corpus)


def _defaults() -> dict[str, Any]:
    """Default of every setting by its dotted name, as far as it has one."""
    values = {f"model.{declared.name}": declared.default for declared in fields(ModelConfig)}
    sections = asdict(Config())
    del sections["model"]
    return values | flatten(sections)


DEFAULTS = _defaults()


def refuse_changed(jobs: Iterable[Job]) -> None:
    """A finished run counts only if it is what its folder's name says.

    A run may have been taken to other steps by itself, and each run reads the text for itself, which may have changed
    meanwhile.
    """
    changed = [job for job in jobs if job.finished and not is_what_its_name_says(job)]
    if changed:
        folders = ", ".join(str(job.folder) for job in changed)
        raise UserError(
            f"not the runs that they began as: {folders}. Their settings have changed since, or their text changed "
            "while they ran, so they would be compared with unlike runs. Remove these folders, and run again"
        )


def is_what_its_name_says(job: Job) -> bool:
    # What the run has seen is in its summary, which it wrote at its end.
    summary = read_object(job.folder / SUMMARY)
    corpus = {name: summary.get(name) or job.corpus.get(name) for name in HASHES}
    data = prepared(job.config.data)
    unfelt = unfelt_settings(job.config, data)
    settings = read_object(job.folder / CONFIG)
    return identity_of(settings, corpus, unfelt) == digits_of(job.folder)


def retry_with_other_limits(job: Job) -> None:
    """A run that diverged is tried again if settings changed that its hash leaves out, such as steps to leave out."""
    if not job.diverged or not (job.folder / CONFIG).exists():
        return
    # The folder's name is the same: other settings would have given it another.
    data = prepared(job.config.data)
    before, after = read_object(job.folder / CONFIG), resolved(job.config, data)
    free = OUTER | TEXT | unfelt_settings(job.config, data)
    if differences(before, after, free):
        (job.folder / DIVERGED).unlink()


def carry_out(
    jobs: Sequence[Job],
    out: Path,
    processes: int,
    console: Console,
    *,
    go_on: str,
    table: Callable[[], Any],
    seconds: float = math.inf,
    whole: bool = False,
) -> dict[str, str]:
    """Make the runs that are missing and write table.json, also after Ctrl-C; returns what failed, by label."""
    if processes < 1:
        raise SettingError("jobs", "must be at least 1", processes)
    # What runs say goes to their logs; what concerns all is said here once.
    waiting = [job for job in jobs if not job.finished]
    warnings = [ends_in_warmup(job.config.train.steps, job.config.optim) for job in waiting]
    for warning in dict.fromkeys(filter(None, warnings)):
        console.print(printable(warning), soft_wrap=True)
    try:
        return run_all(jobs, processes, console, go_on=go_on, seconds=seconds, whole=whole)
    finally:
        refuse_changed(jobs)
        write_json(out / TABLE, table())


def standing(out: Path, jobs: Sequence[Job], processes: int) -> StudyResult:
    """Count the runs, with an estimate of the time for those that are left."""
    # Without a finished run nothing is known of the time.
    finished = {job: TrainResult.read(job.folder) for job in jobs if job.finished}
    waiting = [job for job in jobs if not (job.finished or job.diverged)]
    seconds = None
    if finished:
        total = sum(seconds_for(job, finished) for job in waiting)
        seconds = total / min(processes, len(waiting) or 1)
    return StudyResult(
        folder=out,
        finished={job.folder.name: result for job, result in finished.items()},
        left=tuple(job.folder.name for job in waiting),
        seconds=seconds,
        diverged=tuple(job.folder.name for job in jobs if job.diverged),
    )


def seconds_for(job: Job, finished: Mapping[Job, TrainResult]) -> float:
    """Estimate a run's time from finished runs, by what each operation took them.

    Runs that differ in the seed alone tell most; else those of the same residual; else all.
    """
    # The runs that are most like it, as far as there are some.
    residual, settings = job.config.model.residual, seedless(job.config)
    same_residual = [other for other in finished if other.config.model.residual == residual]
    other_seeds = [other for other in same_residual if seedless(other.config) == settings]
    times = []
    for other in other_seeds or same_residual or finished:
        times.append(finished[other].seconds * job.work / other.work)
    return statistics.median(times)


def seedless(config: Config) -> Config:
    return replace(config, train=replace(config.train, seed=0))


def operations(config: Config, data: Dataset) -> float:
    """Operations of a whole run."""
    model = model_of(config, data)
    tokens = config.train.steps * config.train.batch_size * model.config.context
    return float(model.flops_per_token(model.config.context) * tokens)


def say_how_it_stands(console: Console, result: StudyResult, jobs: Sequence[Job]) -> None:
    """Print what is done and left, and which folders belong to no run: reports and fits would take them too."""
    console.print(printable(describe(result)), soft_wrap=True)
    runs = result.folder / "runs"
    names = {path.parent.name for path in runs.glob(f"*/{CONFIG}")}
    strangers = sorted(names - {job.folder.name for job in jobs})
    if strangers:
        words = f"of no run of this file: {', '.join(strangers)}, in {runs}"
        console.print(printable(words), soft_wrap=True)


def describe(result: StudyResult) -> str:
    """Say in a line how many runs are done, and how long the others will take."""
    complete, remaining, bad = len(result.finished), len(result.left), len(result.diverged)
    text = f"{result.folder}: {complete} of {complete + remaining + bad} runs finished"
    if bad:
        names = ", ".join(result.diverged)
        text += f", {bad} diverged ({names}; run again if settings change or the folder is removed)"
    if not remaining:
        return text
    if result.seconds is None:
        return f"{text}; how long the others take is known when one is done"
    minutes = result.seconds / 60
    duration = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
    return f"{text}; {duration} for the {remaining} left"
