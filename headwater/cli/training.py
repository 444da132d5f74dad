"""Commands that train, or say what training would take."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from pathlib import Path

from headwater.cli.flags import (
    DEMO,
    RESIDUALS,
    SEEDS,
    CompareFlags,
    DemoFlags,
    ExportFlags,
    PlanFlags,
    RunFlags,
    StudyFlags,
    settings_of,
)
from headwater.cli.looking import inspect, make_report
from headwater.cli.models import say
from headwater.cli.parser import parse
from headwater.errors import UserError, command, spell, user_values
from headwater.folders import whole_folder
from headwater.runs.files import read_json
from headwater.train.files import refuse_others


def train(argv: list[str]) -> None:
    """Train one model."""
    flags = parse(RunFlags, argv, train)
    if flags.resume and (flags.out / "state.json").is_file():
        run_folder = flags.out.parent.parent
        raise UserError(
            f"{flags.out} is a checkpoint. Resume its run with {spell('out', run_folder)}, or begin "
            f"another run with {spell('train.init_from', flags.out)}"
        )
    settings = settings_of(flags, saved_in(flags, "config.json"))
    from headwater.train import train as run

    result = run(settings, flags.out, resume=flags.resume)
    if int(os.environ.get("RANK", "0")) == 0:
        loss = f"{result.bits_per_byte:.4f} bits per byte on held-out text"
        say(f"{flags.out}: {loss} after {result.steps} steps")


def saved_in(flags: RunFlags, name: str) -> Path | None:
    """The file of settings in the folder that is resumed, if it is there."""
    saved = flags.out / name
    return saved if flags.resume and saved.exists() else None


def compare(argv: list[str]) -> None:
    """Train several residuals with several seeds on equal tokens, and print one table."""
    flags = parse(CompareFlags, argv, compare)
    # A comparison sets these itself, run by run.
    for section, one, several in (("model", "residual", "residuals"), ("train", "seed", "seeds")):
        if one in flags.settings[section]:
            raise UserError(f"compare takes {spell(several)}, not {spell(one)}")
    settings = settings_of(flags, saved_in(flags, "settings.json"))
    # A resumed comparison goes on with its lists, or with the ones that are typed.
    residuals, seeds = RESIDUALS, SEEDS
    if flags.resume and (flags.out / "compare.json").exists():
        saved = read_json(flags.out / "compare.json")
        residuals, seeds = tuple(saved["residuals"]), tuple(saved["seeds"])
    from headwater.train import compare as run

    run(
        settings,
        flags.out,
        residuals=flags.residuals or residuals,
        seeds=flags.seeds or seeds,
        jobs=flags.jobs,
        resume=flags.resume,
    )
    say(
        f"Runs and table.json are in {flags.out}; look at them with: {command('report', flags.out)}"
    )


def study(argv: list[str]) -> None:
    """Run what is missing of the runs that a TOML file describes, as far as time allows."""
    flags = parse(StudyFlags, argv, study)
    from headwater.train import study as run

    minutes = math.inf if flags.minutes is None else flags.minutes
    result = run(flags.recipe, flags.out, minutes=minutes, whole=flags.whole)
    if result.finished:
        folder = result.folder
        report, scaling = command("report", folder), command("scaling", folder)
        look = f"{report}, and {scaling} for three sizes or more"
        say(f"Runs and table.json are in {folder}; look at them with: {look}")


def plan(argv: list[str]) -> None:
    """Say what a run needs on each rank: memory, bytes between stages, bubble. Starts nothing."""
    # The file may stand first, as `headwater plan run.toml`.
    argv = ["--config", *argv] if argv and not argv[0].startswith("-") else argv
    flags = parse(PlanFlags, argv, plan)
    settings = settings_of(flags)
    from headwater.train.data.tokenizer import expected_vocabulary
    from headwater.train.distributed.plan import describe, make_plan
    from headwater.train.run import with_vocabulary

    # Without a vocabulary in the settings, that of the tokenizer counts.
    words = 1 if settings.model.vocab_size else expected_vocabulary(settings.data)
    with user_values():
        model = with_vocabulary(settings.model, words)
        layout = make_plan(settings, model, flags.world, half=flags.gpu, fused=flags.gpu)
    say(describe(layout, flags.memory, settings.train.checkpoint_activations))


def export(argv: list[str]) -> None:
    """Write the model of a run, whatever its layout, as one safetensors file."""
    flags = parse(ExportFlags, argv, export)
    refuse_others(flags.out, "an exported model")
    from headwater.train import load_run

    # Whatever layout it was trained under, the model is written as one file.
    model, tokenizer, _ = load_run(flags.folder)
    with whole_folder(flags.out) as folder:
        model.save(folder)
        tokenizer.save(folder)
    say(f"{flags.out}: {model.parameter_count()['total']:,} parameters in model.safetensors")


def demo(argv: list[str]) -> None:
    """Look into two trained models, then compare their residuals here: four to six minutes on two cores."""
    flags = parse(DemoFlags, argv, demo)
    from headwater.train import compare as run

    began = time.monotonic()
    # A comparison's folder holds nothing else.
    page = flags.out.with_name(f"{flags.out.name}-pair.html")
    inspect(["demo", "--out", str(page)])
    looked = time.monotonic()
    say(
        f"After {looked - began:.0f} s the page has two trained models side by side: the plain one ended at "
        "0.847 bits per byte, the one with Block Attention Residuals at 0.811."
    )
    say(
        "Open it: the source that the second model misses most is marked. Meanwhile both residuals are "
        f"trained here, small, with {len(DEMO['seeds'])} seeds."
    )
    run(
        DEMO["config"],
        flags.out,
        residuals=DEMO["residuals"],
        seeds=DEMO["seeds"],
        jobs=flags.jobs,
        resume=(flags.out / "compare.json").exists(),
    )
    trained = time.monotonic()
    path = make_report([flags.out], flags.out / "report.html")
    ended = time.monotonic()
    say(f"Report: {path.resolve()}")
    say(
        f"Seconds: {looked - began:.0f} to the first page, {trained - looked:.0f} of training, "
        f"{ended - trained:.0f} for the report; {ended - began:.0f} in all."
    )
    # Without the environment on the path, the commands need the place that this one was called by.
    program = Path("headwater") if shutil.which("headwater") else Path(sys.argv[0])
    say(f"""Next:
  {program} inspect demo --serve
      asks the two trained models what you type
  {program.with_name("python")} examples/own_transformer.py
      puts Attention Residuals into a model of your own
  {program} train --source docs --residual attnres-block --size nano --steps 200 --out runs/docs
      trains on a text of your own, here the documentation""")
