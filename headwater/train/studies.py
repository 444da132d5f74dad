"""The folder of a study: which runs of a recipe are finished and count, what is missing and is run, how long it takes.

A run's folder is named after what the recipe's lists gave it when it began, and keeps that name when they change. Its
weights are dropped when it is finished, unless the recipe says `keep_weights = true`: metrics, settings and summary
stay, which is what reports and fits are made of. Runs side by side on one GPU compute at the same time where NVIDIA's
MPS is installed (sharing.py), else in turns.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.residuals.parameter_groups import sort_parameters
from headwater.residuals.plugins import flags_for
from headwater.residuals.registry import suspected
from headwater.train.config import Config
from headwater.train.data.dataset import Dataset
from headwater.train.differences import FREE, OUTER, differences, fingerprint
from headwater.train.files import locked, read_json, refuse_others, write_json
from headwater.train.jobs import Job, plugin_for, refuse_failures, run_all
from headwater.train.optim import ends_in_warmup
from headwater.train.recipes import (
    Recipe,
    as_settings,
    in_words_of_recipes,
    model_of,
    prepared,
    read_recipe,
)
from headwater.train.results import DIVERGED, SUMMARY, TrainResult

CORPORA = "corpora.json"  # of each run the tokens that it sees, as hashes
KNOWN = ("settings", "runs", "table.json", CORPORA)  # what is there before its first run is


@dataclass(frozen=True)
class StudyResult:
    """`finished` runs by name, those that `diverged`, and what is `left`; `seconds` is an estimate for that, None
    before any run is done."""

    folder: Path
    finished: dict[str, TrainResult]
    left: tuple[str, ...]
    seconds: float | None
    diverged: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """The rows as table.json has them: the name of each finished run, its settings and its result."""
        files = {
            name: (run.folder / "config.json", run.folder / SUMMARY)
            for name, run in self.finished.items()
        }
        return [
            {"run": name, **read_json(config), **read_json(result)}
            for name, (config, result) in files.items()
        ]


@in_words_of_recipes()
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
        whole: start no run that would not end in those minutes, going by those that have ended, but a shorter one
            instead: for a machine whose disk is lost.
        progress: show how far the runs are.

    Returns a `StudyResult`. A run that diverged is a result as well, and is not repeated unless its settings change or
    its folder is removed. Raises `headwater.errors.UserError` for a file that does not fit, for a folder whose runs
    were made with other settings, and, after all others have ended, for runs that failed.

        study("studies/noise/recipe.toml", minutes=20)
    """
    began = time.monotonic()
    if not minutes >= 0:
        raise UserError(
            f"minutes must be 0, to start nothing, or a positive number; got {minutes:g}"
        )
    console = Console(
        quiet=not progress, markup=False, highlight=False
    )  # names and messages may have [brackets]
    plan = read_recipe(at_home(recipe))
    go_on = f"headwater study {quote(str(recipe))}" + (
        "" if out is None else f" --out {quote(str(out))}"
    )
    go_on += flags_for(plugin_for(config.model.residual) for config in plan.runs.values())
    out = Path("runs") / plan.name if out is None else at_home(out)
    if (out / "compare.json").exists() or not any((out / "runs").glob("*/config.json")):
        refuse_others(out, "a study", known=KNOWN)
    with locked(out):
        (out / "settings").mkdir(exist_ok=True)
        work = {name: operations_of(name, config) for name, config in plan.runs.items()}
        seen = read_json(out / CORPORA) if (out / CORPORA).exists() else {}
        names, others = folders_of(plan.runs, out / "runs", seen)
        jobs = [
            job_of(names[name], config, out, plan.keep_weights, work[name])
            for name, config in plan.runs.items()
        ]
        plan = replace(plan, runs={names[name]: config for name, config in plan.runs.items()})
        write_json(out / CORPORA, refuse_other_settings(jobs, plan, seen))
        for name, config in plan.runs.items():
            write_json(out / "settings" / f"{name}.json", asdict(config))
        result = standing(out, jobs, plan)
        before = describe(result)
        console.print(before, soft_wrap=True)
        if others:
            console.print(
                f"of no run of this file: {', '.join(others)}, in {out / 'runs'}", soft_wrap=True
            )
        left = [plan.runs[name] for name in result.left]
        for said in dict.fromkeys(
            filter(None, (ends_in_warmup(one.train.steps, one.optim) for one in left))
        ):
            console.print(as_settings(said), soft_wrap=True)
        due = [job for job in jobs if not job.diverged]
        try:
            seconds = 60 * minutes - (
                time.monotonic() - began
            )  # to prepare the text may take minutes
            failures = run_all(due, plan.jobs, console, go_on=go_on, seconds=seconds, whole=whole)
        finally:  # also of what Ctrl-C has interrupted
            result = standing(out, jobs, plan)
            write_json(out / "table.json", result.table())
        for label in failures.keys() & {*result.diverged}:
            console.print(as_settings(failures.pop(label)), soft_wrap=True)
        if describe(result) != before:
            console.print(describe(result), soft_wrap=True)
        if result.left and not failures and 0 < minutes < math.inf:
            why = "would end in" if whole else "is begun after"
            console.print(
                f"no other run {why} the {minutes:g} minutes; go on with: {go_on}", soft_wrap=True
            )
    refuse_failures(
        failures,
        len(jobs),
        f"Settings are those of {recipe}; the same command tries again what failed",
    )
    return result


def operations_of(name: str, config: Config) -> float:
    """A run's model is made without weights, so that one that does not fit is known before anything runs, as is a
    corpus that is too short."""
    try:
        with suspected(config.model.residual):
            work = operations(config)
        data = prepared(config.data)
        data.check_length(model_of(config, data).config.context)
        return work
    except UserError as error:
        raise UserError(f"run {name} does not fit: {error}") from None


def folders_of(
    runs: Mapping[str, Config], folder: Path, seen: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """By the name that a run has in the file, that of its folder; and the folders that no run of the file has.

    A run that began under another name, because the file's lists have changed their order or are more, keeps it: else
    it would be made again, and a fit would have two runs of one seed. `seen`: by folder what it has seen of its text,
    which may have moved."""
    held: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/config.json")):
        if path.parent.name not in runs:
            with suppress(UserError):  # one that cannot be read is of no run of the file
                saved = read_json(path)
                saved = saved if isinstance(saved, dict) else {}
                held[path.parent.name] = {
                    **saved,
                    "data": seen.get(path.parent.name) or saved.get("data"),
                }
    known: dict[
        frozenset[str], dict[Hashable, str]
    ] = {}  # by what may differ, which the residual decides
    names = {}
    for name, config in runs.items():
        names[name] = name
        if held and not (folder / name / "config.json").exists():
            data = prepared(config.data)
            free = OUTER | idle(config, data)
            if free not in known:
                known[free] = {fingerprint(saved, free): other for other, saved in held.items()}
            for text in (data.identity, asdict(config.data)):
                if names[name] == name:
                    asked = {**settings_of(config, data), "data": text}
                    names[name] = known[free].pop(fingerprint(asked, free), name)
    return names, sorted(held.keys() - names.values())


def job_of(name: str, config: Config, out: Path, keep_weights: bool, work: float) -> Job:
    return Job(
        label=name,
        folder=out / "runs" / name,
        arguments=("--config", str(out / "settings" / f"{name}.json")),
        steps=config.train.steps,
        plugin=plugin_for(config.model.residual),
        work=work,
        keep_weights=keep_weights,
    )


def refuse_other_settings(
    jobs: Sequence[Job], plan: Recipe, known: Mapping[str, Any]
) -> dict[str, Any]:
    """A run that is finished counts, and one that was cut off goes on, only if it is the one that the file describes:
    `headwater train --resume` would take the latter to other steps. One that diverged is tried again with other
    settings, from the start if they make it another run. A factor on the rate of queries changes nothing where there
    are none: runs from before its default was another still count. `known` is what each has seen of its text, and what
    is returned what all of them see: a file that has changed keeps its name."""
    seen = dict(known)
    again: list[Job] = []
    anew: list[Job] = []
    for job, config in zip(jobs, plan.runs.values(), strict=True):
        data = prepared(config.data)
        if (
            job.finished or job.diverged or any((job.folder / "checkpoints").glob("step-*"))
        ):  # else it begins anew
            text = {
                **seen.get(job.label, {}),
                **text_of(job),
            }  # which may have changed while others ran
            asked = {
                **settings_of(config, data),
                "corpus": {key: data.identity[key] for key in text},
            }
            saved = {**read_json(job.folder / "config.json"), "corpus": text}
            unfelt = idle(config, data)
            listing = differences(saved, asked, FREE | unfelt)
            if listing and not job.diverged:
                raise UserError(
                    f"{job.folder} holds a run with other settings, or on other text:\n  "
                    + "\n  ".join(listing)
                    + "\nTake back the change, remove that folder, or choose another --out"
                )
            if listing:
                anew.append(job)
            if differences(
                saved, asked, OUTER | unfelt
            ):  # such as more steps that it may leave out: worth another try
                again.append(job)
        seen[job.label] = data.identity
    for job in anew:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    for job in again:
        (job.folder / DIVERGED).unlink(missing_ok=True)
    return seen


def settings_of(config: Config, data: Dataset) -> dict[str, Any]:
    """As the config.json of a run has them."""
    from headwater.train.run import resolve_model

    return {**asdict(config), "model": resolve_model(config.model, data).to_dict()}


def text_of(job: Job) -> dict[str, str]:
    """What a run says of its text where no corpora.json does, as in an archive of metrics."""
    known = TrainResult.read(job.folder).source_hash if job.finished else ""
    return {"source_hash": known} if known else {}


def idle(config: Config, data: Dataset) -> frozenset[str]:
    """Settings that change nothing of a run: a factor on the rate of queries where there are none."""
    return (
        frozenset()
        if sort_parameters(model_of(config, data))["queries"]
        else frozenset({"optim.query_lr"})
    )


def standing(out: Path, jobs: Sequence[Job], plan: Recipe) -> StudyResult:
    """What is done and what is left. The time for the rest is estimated from the runs that are done: how long their
    processes took to start, and then each operation. Of a run, by those that differ in the seed alone, where there are
    any; else by those of its residual; else by all."""
    finished = {job: TrainResult.read(job.folder) for job in jobs if job.finished}
    diverged = tuple(job.label for job in jobs if job.diverged)
    left, seconds = [job for job in jobs if not (job.finished or job.diverged)], None

    def seconds_for(job: Job) -> float:
        asked = plan.runs[job.label]
        kin = [
            done
            for done in finished
            if plan.runs[done.label].model.residual == asked.model.residual
        ]
        twins = [done for done in kin if seedless(plan.runs[done.label]) == seedless(asked)]
        alike = twins or kin or list(finished)
        return statistics.median(
            start_of(done.folder) + finished[done].seconds * job.work / done.work for done in alike
        )

    if finished:
        seconds = sum(map(seconds_for, left)) / min(plan.jobs, len(left) or 1)
    results = {job.label: result for job, result in finished.items()}
    return StudyResult(out, results, tuple(job.label for job in left), seconds, diverged)


def seedless(config: Config) -> Config:
    return replace(config, train=replace(config.train, seed=0))


def start_of(folder: Path) -> float:
    """Seconds from the launch of a run's last process to its first step, by when files were written; the summary does
    not count them."""
    launched, began = (folder / name for name in ("launch.json", "config.json"))
    return max(0.0, began.stat().st_mtime - launched.stat().st_mtime) if launched.exists() else 0.0


def operations(config: Config) -> float:
    model = model_of(config, prepared(config.data))
    tokens = config.train.steps * config.train.batch_size * model.config.context
    return float(model.flops_per_token(model.config.context) * tokens)


def describe(result: StudyResult) -> str:
    done, left, bad = len(result.finished), len(result.left), len(result.diverged)
    text = f"{result.folder}: {done} of {done + left + bad} runs finished"
    if bad:
        names = ", ".join(result.diverged)
        text += f", {bad} diverged ({names}; not run again unless settings change or the folder is removed)"
    if not left:
        return text
    if result.seconds is None:
        return f"{text}; how long the others take is known when one is done"
    whole = round(result.seconds / 60)
    minutes = (
        "less than a minute" if result.seconds < 60 else f"about {whole} minute{'s' * (whole > 1)}"
    )
    return f"{text}; {minutes} for the {'one that is' if left == 1 else f'{left} that are'} left"
