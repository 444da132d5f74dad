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

from headwater.errors import UserError, command, dotted, spelling
from headwater.folders import at_home
from headwater.models.config import ModelConfig
from headwater.residuals.parameter_groups import sort_parameters
from headwater.residuals.registry import suspected
from headwater.runs.files import read_object
from headwater.runs.identity import HASHES, digits_of, folder_of, identity, slug
from headwater.runs.launch import LAUNCH
from headwater.runs.record import COMPARISON, CONFIG, SUMMARY
from headwater.runs.results import DIVERGED, TrainResult
from headwater.runs.settings import Config, flatten
from headwater.train.data.dataset import Dataset
from headwater.train.differences import FREE, OUTER, TEXT, differences
from headwater.train.files import locked, refuse_others, write_json
from headwater.train.jobs import Job, plugin_for, refuse_failures, run_all
from headwater.train.optim import ends_in_warmup
from headwater.train.recipes import PlannedRun, model_of, prepared, read_recipe

TABLE = "table.json"


@dataclass(frozen=True)
class StudyResult:
    """How a study stands: `finished` runs by the name of their folder, and those that `diverged` or are `left`.

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
    if not minutes >= 0:
        raise UserError(f"minutes must be 0, to start nothing, or positive; got {minutes:g}")
    # Names and messages may have [brackets], which rich would take for markup.
    console = Console(quiet=not progress, markup=False, highlight=False)
    with spelling(dotted):
        plan = read_recipe(at_home(recipe))
        go_on = command("study", recipe, out=out, plugin=plugins_of(plan.runs))
        folder = Path("runs") / slug(plan.name) if out is None else at_home(out)
        if (folder / COMPARISON).exists() or not any((folder / "runs").glob(f"*/{CONFIG}")):
            refuse_others(folder, "a study", known=("settings", "runs", TABLE))
        with locked(folder):
            jobs = place(plan.runs, folder, keep_weights=plan.keep_weights)
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
            before, result = result, standing(folder, jobs, plan.jobs)
        for job in jobs:
            if job.diverged and job.label in failures:
                console.print(failures.pop(job.label), soft_wrap=True)
        if describe(result) != describe(before):
            console.print(describe(result), soft_wrap=True)
        if result.left and not failures and 0 < minutes < math.inf:
            why = "would end in" if whole else "is begun after"
            words = f"no other run {why} the {minutes:g} minutes; go on with: {go_on}"
            console.print(words, soft_wrap=True)
        advice = f"Settings are those of {recipe}; the same command tries again what failed"
        refuse_failures(failures, len(jobs), advice)
    return result


def plugins_of(runs: Iterable[PlannedRun]) -> list[str]:
    """Modules that the processes of these runs import for their residuals."""
    modules = [plugin_for(run.config.model.residual) for run in runs]
    return list(dict.fromkeys(module for module in modules if module))


def place(runs: Sequence[PlannedRun], out: Path, *, keep_weights: bool) -> list[Job]:
    """The job of each run, in its folder; writes the files of their settings.

    Raises UserError before anything runs: for a model or a text that does not fit, and for a folder whose run is not
    what its name says.
    """
    jobs: dict[str, Job] = {}
    for run in runs:
        data = prepared_for(run)
        unfelt = unfelt_settings(run.config, data)
        digits = identity_of(resolved(run.config, data), data.identity, unfelt)
        if digits in jobs:
            refuse_same_run(jobs[digits], run, unfelt)
            continue
        jobs[digits] = Job(
            label=run.label,
            folder=folder_of(out / "runs", run.label, digits),
            config=run.config,
            arm=run.arm,
            corpus=data.identity,
            work=operations(run.config, data),
            keep_weights=keep_weights,
        )
    refuse_changed(jobs.values())
    for job in jobs.values():
        (out / "settings").mkdir(exist_ok=True, parents=True)
        write_json(job.settings, asdict(job.config))
        retry_with_other_limits(job)
    return list(jobs.values())


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
    ignored = FREE | TEXT | unfelt
    counted = {}
    for key, value in flatten(dict(settings)).items():
        if key not in ignored and (key not in DEFAULTS or DEFAULTS[key] != value):
            counted[key] = value
    return identity(counted, corpus)


def _defaults() -> dict[str, Any]:
    """Default of every setting by its dotted name, as far as it has one."""
    values = {f"model.{each.name}": each.default for each in fields(ModelConfig)}
    sections = {name: values for name, values in asdict(Config()).items() if name != "model"}
    return values | flatten(sections)


DEFAULTS = _defaults()


def refuse_same_run(first: Job, other: PlannedRun, unfelt: frozenset[str]) -> None:
    """Two runs of a recipe have one folder: fine if they are equal, and else no question that a study answers."""
    listing = differences(asdict(first.config), asdict(other.config), unfelt | TEXT)
    if listing:
        details = "\n  ".join(listing)
        raise UserError(
            f"runs {first.label} and {other.label} compute the same, and differ only in:\n  {details}\nLeave one out, "
            "or use another study for each"
        )


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
    data = prepared(job.config.data)
    saved, asked = read_object(job.folder / CONFIG), resolved(job.config, data)
    free = OUTER | TEXT | unfelt_settings(job.config, data)
    if differences(saved, asked, free):
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
    waiting = [job for job in jobs if not job.finished]
    warnings = [ends_in_warmup(job.config.train.steps, job.config.optim) for job in waiting]
    for warning in dict.fromkeys(filter(None, warnings)):
        console.print(warning, soft_wrap=True)
    try:
        return run_all(jobs, processes, console, go_on=go_on, seconds=seconds, whole=whole)
    finally:
        refuse_changed(jobs)
        write_json(out / TABLE, table())


def standing(out: Path, jobs: Sequence[Job], processes: int) -> StudyResult:
    """How the runs stand, with an estimate of the time for those that are left."""
    finished = {job: TrainResult.read(job.folder) for job in jobs if job.finished}
    left = [job for job in jobs if not (job.finished or job.diverged)]
    seconds = None
    if finished:
        total = sum(seconds_for(job, finished) for job in left)
        seconds = total / min(processes, len(left) or 1)
    return StudyResult(
        out,
        {job.folder.name: result for job, result in finished.items()},
        tuple(job.folder.name for job in left),
        seconds,
        tuple(job.folder.name for job in jobs if job.diverged),
    )


def seconds_for(job: Job, finished: Mapping[Job, TrainResult]) -> float:
    """Estimate a run's time from finished runs: how long their processes took to start, and then each operation.

    Runs that differ in the seed alone tell most; else those of the same residual; else all.
    """
    residual, settings = job.config.model.residual, seedless(job.config)
    kin = [other for other in finished if other.config.model.residual == residual]
    twins = [other for other in kin if seedless(other.config) == settings]
    times = []
    for other in twins or kin or finished:
        times.append(start_of(other.folder) + finished[other].seconds * job.work / other.work)
    return statistics.median(times)


def seedless(config: Config) -> Config:
    return replace(config, train=replace(config.train, seed=0))


def start_of(folder: Path) -> float:
    """Seconds from the launch of a run's last process to its first step, which the summary does not count.

    They are told by when files were written.
    """
    launched, began = folder / LAUNCH, folder / CONFIG
    return max(0.0, began.stat().st_mtime - launched.stat().st_mtime) if launched.exists() else 0.0


def operations(config: Config, data: Dataset) -> float:
    """Operations of a whole run."""
    model = model_of(config, data)
    tokens = config.train.steps * config.train.batch_size * model.config.context
    return float(model.flops_per_token(model.config.context) * tokens)


def say_how_it_stands(console: Console, result: StudyResult, jobs: Sequence[Job]) -> None:
    """Print what is done and left, and which folders belong to no run: reports and fits would take them too."""
    console.print(describe(result), soft_wrap=True)
    ours = {job.folder.name for job in jobs}
    runs = result.folder / "runs"
    others = sorted({path.parent.name for path in runs.glob(f"*/{CONFIG}")} - ours)
    if others:
        console.print(f"of no run of this file: {', '.join(others)}, in {runs}", soft_wrap=True)


def describe(result: StudyResult) -> str:
    """Say in a line how many runs are done, and how long the others will take."""
    done, left, bad = len(result.finished), len(result.left), len(result.diverged)
    text = f"{result.folder}: {done} of {done + left + bad} runs finished"
    if bad:
        names = ", ".join(result.diverged)
        text += f", {bad} diverged ({names}; not run again unless settings change or the folder is removed)"
    if not left:
        return text
    if result.seconds is None:
        return f"{text}; how long the others take is known when one is done"
    minutes = round(result.seconds / 60)
    duration = f"about {minutes} minute{'s' * (minutes > 1)}"
    if result.seconds < 60:
        duration = "less than a minute"
    return f"{text}; {duration} for the {'one that is' if left == 1 else f'{left} that are'} left"
