"""Commands that train, or say what training would take."""

from __future__ import annotations

import math
import os
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
from headwater.cli.looking import make_report
from headwater.cli.models import say
from headwater.cli.parser import parse
from headwater.errors import UserError, command, spell, user_values
from headwater.folders import whole_folder
from headwater.runs.settings import Config
from headwater.train.files import read_json, refuse_others


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
    for section, one, several in (("model", "residual", "residuals"), ("train", "seed", "seeds")):
        if one in flags.settings[section]:
            raise UserError(f"compare takes {spell(several)}, not {spell(one)}")
    settings = settings_of(flags, saved_in(flags, "settings.json"))
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
    done = run(flags.recipe, flags.out, minutes=minutes, whole=flags.whole)
    if done.finished:
        report, scaling = command("report", done.folder), command("scaling", done.folder)
        look = f"{report}, and {scaling} for three sizes or more"
        say(f"Runs and table.json are in {done.folder}; look at them with: {look}")


def plan(argv: list[str]) -> None:
    """Say what a run will need on each rank: memory, bytes between stages, bubble. Starts nothing."""
    # The file may stand first, as `headwater plan run.toml`.
    argv = ["--config", *argv] if argv and not argv[0].startswith("-") else argv
    flags = parse(PlanFlags, argv, plan)
    settings = settings_of(flags)
    from headwater.train.data.tokenizer import expected_vocabulary
    from headwater.train.distributed.plan import describe, make_plan
    from headwater.train.run import with_vocabulary

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

    model, tokenizer, _ = load_run(flags.folder)
    with whole_folder(flags.out) as folder:
        model.save(folder)
        tokenizer.save(folder)
    say(f"{flags.out}: {model.parameter_count()['total']:,} parameters in model.safetensors")


def demo(argv: list[str]) -> None:
    """Compare the plain residual with Attention Residuals here: a few minutes on two cores."""
    flags = parse(DemoFlags, argv, demo)
    from headwater.train import compare as run

    config = Config(model=DEMO["model"], optim=DEMO["optim"], train=DEMO["train"])
    begun = (flags.out / "compare.json").exists()
    run(
        config,
        flags.out,
        residuals=DEMO["residuals"],
        seeds=DEMO["seeds"],
        jobs=flags.jobs,
        resume=begun,
    )
    say(f"Report: {make_report([flags.out], flags.out / 'report.html').resolve()}")
