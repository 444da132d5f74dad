"""Several arms, residuals as a rule, by several seeds on equal tokens: one process per run, one table.

Runs with the same seed see the same batches in the same order, so their losses are compared in pairs. The folder is the
state: finished runs are kept, unfinished ones resume.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

from rich.console import Console

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.residuals.plugins import flags_for
from headwater.residuals.registry import suspected
from headwater.runs.tables import print_table
from headwater.train.arms import parse_arm
from headwater.train.config import TOKENIZERS, Config, check, plain
from headwater.train.data.dataset import Dataset, prepare
from headwater.train.data.tokenizer import kept_tokenizer
from headwater.train.differences import OUTER, differences
from headwater.train.files import locked, read_json, refuse_others, write_json
from headwater.train.jobs import Job, plugin_for, refuse_failures, run_all, side_by_side
from headwater.train.monitor.interrupts import RESUME
from headwater.train.optim import ends_in_warmup
from headwater.train.results import CompareResult, TrainResult
from headwater.train.table import table_of, tabulate


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
        config: of every run but for its residual and seed.
        out: folder of the comparison: table.json, and under runs/ a folder for each run, which `load_run` takes.
        residuals: specifications such as "attnres-block:block=4", the baseline first; "all" is every registered one.
            Settings of the model may follow, which makes other arms of them: "standard+shortswa=4".
        seeds: of the initial weights and the order of the data; runs of one seed are compared in pairs.
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
    config, console, out = check(config), Console(quiet=not progress), at_home(out)
    jobs = plain(jobs)
    residuals, seeds = admit(config, residuals, plain(seeds), jobs)
    if not (out / "compare.json").exists():
        if resume:
            raise UserError(
                f"there is no comparison at {out} to resume: check --out, or leave --resume out to start one"
            )
        refuse_others(out, "a comparison", known=("settings.json",))
    with locked(out):
        config = replace(config, data=kept_tokenizer(config.data, out))
        data = prepare(config.data)
        if config.data.tokenizer not in TOKENIZERS:
            data.tokenizer.save(out)
        try_out(residuals, config, data)
        residuals, seeds = plan(config, out, residuals, seeds, data.identity, resume=resume)
        runs = {
            (spec, seed): job_of(spec, seed, out, config.train.steps)
            for seed in seeds
            for spec in residuals
        }
        command = f"headwater compare --out {quote(str(out))}" + flags_for(
            run.plugin for run in runs.values()
        )
        if problem := unlike(runs, config.train.steps, data):
            raise UserError(problem)
        left = not all(run.finished for run in runs.values())
        if left and (said := ends_in_warmup(config.train.steps, config.optim)):
            console.print(said, soft_wrap=True)
        try:
            failures = run_all(list(runs.values()), jobs, console, go_on=command + RESUME)
        finally:  # also of what Ctrl-C has interrupted
            result = result_of(runs, residuals, out)
            if not (problem := unlike(runs, config.train.steps, data)):
                write_json(out / "table.json", result.table())
        if problem:
            raise UserError(problem)
        print_table(table_of(result.rows, config.train.steps), console)
    refuse_failures(failures, len(runs), f"Mend the cause and go on with: {command} --resume")
    return result


def unlike(runs: dict[tuple[str, int], Job], steps: int, data: Dataset) -> str:
    """Why what has finished is no comparison; empty if it is one. Each run reads the text by itself: one that was
    changed meanwhile is another for those that began later. And a run may have been taken to other steps, alone."""
    finished = [TrainResult.read(run.folder) for run in runs.values() if run.finished]
    known = ("", data.identity["source_hash"])
    if other := [str(run.folder) for run in finished if run.source_hash not in known]:
        return (
            f"the text has changed while runs were made: {', '.join(other)} saw another than the comparison began "
            "with, so a table would not compare like with like. Put back the text, remove these folders, and --resume"
        )
    if other := [f"{run.folder} after {run.steps}" for run in finished if run.steps != steps]:
        return (
            f"runs of this comparison end after {steps} steps, and {', '.join(other)}, so a table would not compare "
            "like with like. Remove these folders, and --resume"
        )
    return ""


def result_of(runs: dict[tuple[str, int], Job], residuals: list[str], out: Path) -> CompareResult:
    """Of the runs that are finished."""
    done = {place: run for place, run in runs.items() if run.finished}
    finished = {place: TrainResult.read(run.folder) for place, run in done.items()}
    company = {
        spec: side_by_side([run for (s, _), run in done.items() if s == spec]) for spec in residuals
    }
    return CompareResult(
        folder=out, rows=tabulate(finished, residuals, company), runs=tuple(finished.values())
    )


def slug(residual: str, seed: int) -> str:
    return f"{residual.replace(':', '_')}-seed{seed}"


def job_of(text: str, seed: int, out: Path, steps: int) -> Job:
    """A run of an arm of the comparison in `out`, whose settings.json has what all of them share."""
    arm = parse_arm(text)
    return Job(
        label=f"{text} seed {seed}",
        folder=out / "runs" / slug(text, seed),
        arguments=("--config", str(out / "settings.json"), *arm.flags, "--seed", str(seed)),
        steps=steps,
        plugin=plugin_for(arm.residual),
        arm=text if arm.switches else None,
    )


def admit(
    config: Config, residuals: Sequence[str], seeds: Sequence[int], jobs: int
) -> tuple[list[str], list[int]]:
    """The arguments checked, `all` spelled out and every repetition dropped."""
    if isinstance(residuals, str):
        raise UserError(
            f"residuals takes a list of names; got {residuals!r}: write [{residuals!r}]"
        )
    if isinstance(seeds, int):
        raise UserError(f"seeds takes a list of numbers; got {seeds}: write [{seeds}]")
    seeds = [
        check(replace(config, train=replace(config.train, seed=seed))).train.seed for seed in seeds
    ]
    if not isinstance(jobs, int) or jobs < 1:
        raise UserError(f"--jobs must be a whole number from 1; got {jobs}")
    if not seeds:
        raise UserError("--seeds needs at least one seed, for example: --seeds 0 1 2")
    specs = expand(residuals)
    for spec in specs:
        plugin_for(parse_arm(spec).residual)
    return specs, list(dict.fromkeys(seeds))


def expand(residuals: Sequence[str]) -> list[str]:
    """`all` as every registered name, the plain residual first, for the first of the list is the baseline."""
    from headwater.residuals import names

    everything = names()
    if not residuals:
        raise UserError(
            f"--residuals needs at least one name, or `all`. Valid: {', '.join(everything)}"
        )
    return distinct(
        [spec for entry in residuals for spec in (everything if entry == "all" else [entry])]
    )


def distinct(arms: Sequence[str]) -> list[str]:
    """Each arm once, under the first of its spellings."""
    kept: dict[Hashable, str] = {}
    for text in arms:
        kept.setdefault(parse_arm(text).identity, text)
    return list(kept.values())


def try_out(arms: Sequence[str], config: Config, data: Dataset) -> None:
    """Corpus and arms are tried before anything runs, so that a misfit is known at once."""
    from headwater.train.run import build_model, resolve_model

    for text in arms:
        try:
            model = resolve_model(parse_arm(text).apply(config).model, data)
            data.check_length(model.context)
            with suspected(parse_arm(text).residual):
                build_model(model, config.train.seed, meta=True)
        except UserError as error:
            raise UserError(f"arm {text!r} does not fit: {error}") from None


def plan(
    config: Config,
    out: Path,
    residuals: list[str],
    seeds: list[int],
    corpus: dict[str, str],
    *,
    resume: bool,
) -> tuple[list[str], list[int]]:
    """What the folder is to hold, written to compare.json: on resuming, what it held and then what is new."""
    path = out / "compare.json"
    if path.exists():
        if not resume:
            raise UserError(
                f"{out} already holds a comparison: continue it with --resume, or choose another --out"
            )
        saved = read_json(path)
        # Its times and memory are compared too. What a step that is not finite stopped may go on without it.
        free = OUTER | {"train.skip_nonfinite", *(f"corpus.{key}" for key in corpus)}
        seen = {"corpus": saved["corpus"]} if "corpus" in saved else {}
        differing = differences(
            {**saved["config"], **seen}, {**asdict(config), "corpus": corpus}, free
        )
        if differing:
            listing = "\n  ".join(differing)
            raise UserError(
                f"{out} holds a comparison of another configuration:\n  {listing}\nChoose another --out"
            )
        refuse_other_corpus(out, saved.get("corpus", corpus), corpus, config)
        residuals, seeds = (
            distinct(saved["residuals"] + residuals),
            list(dict.fromkeys(saved["seeds"] + seeds)),
        )
    write_json(out / "settings.json", asdict(config))
    write_json(
        path, {"residuals": residuals, "seeds": seeds, "corpus": corpus, "config": asdict(config)}
    )
    return residuals, seeds


def refuse_other_corpus(
    out: Path, saved: dict[str, str], found: dict[str, str], config: Config
) -> None:
    """The configuration names the files; this holds what is in them."""
    listing = [
        f"{key}: {saved.get(key, '')[:12]} there, {found[key][:12]} now"
        for key in found
        if saved.get(key) != found[key]
    ]
    if listing:
        raise UserError(
            f"{out} holds a comparison on another corpus: {', '.join(config.data.source)} has changed since it began "
            f"({'; '.join(listing)}), and its runs would no longer be on equal tokens. Restore the files (or, for "
            "`stdlib`, run the same Python), or choose another --out"
        )
