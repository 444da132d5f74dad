"""Commands that train, or say what training would take."""

from __future__ import annotations

import os
from dataclasses import replace
from shlex import quote

from headwater.cli.flags import (
    DEMO,
    CompareFlags,
    DemoFlags,
    ExportFlags,
    PlanFlags,
    StudyFlags,
    TrainFlags,
    Where,
    base_config,
    parse,
    peek,
    sized,
)
from headwater.cli.looking import make_report
from headwater.cli.models import say
from headwater.errors import UserError, user_values
from headwater.folders import whole_folder
from headwater.train.config import Config, check
from headwater.train.files import read_json, refuse_others


def train(argv: list[str]) -> None:
    """Train one model."""
    where = peek(argv, Where())
    base = base_config(where, where.out / "config.json")
    flags = parse(TrainFlags, argv, train, TrainFlags(settings=base))
    settings = check(sized(flags.settings, argv))
    from headwater.train import train as run

    result = run(settings, flags.out, resume=flags.resume)
    if int(os.environ.get("RANK", "0")) == 0:
        say(
            f"{flags.out}: {result.bits_per_byte:.4f} bits per byte on held-out text after {result.steps} steps"
        )


def compare(argv: list[str]) -> None:
    """Train several residuals with several seeds on equal tokens, and print one table."""
    where = peek(argv, Where(out=CompareFlags.out))
    base = base_config(where, where.out / "settings.json")
    default = CompareFlags(settings=base)
    if where.resume and (where.out / "compare.json").exists():
        saved = read_json(where.out / "compare.json")
        default = replace(default, residuals=tuple(saved["residuals"]), seeds=tuple(saved["seeds"]))
    flags = parse(CompareFlags, argv, compare, default)
    if (flags.settings.model.residual, flags.settings.train.seed) != (
        base.model.residual,
        base.train.seed,
    ):
        raise UserError(
            "compare takes --residuals and --seeds, several of each, in place of --residual and --seed"
        )
    settings = check(sized(flags.settings, argv))
    from headwater.train import compare as run

    run(
        settings,
        flags.out,
        residuals=flags.residuals,
        seeds=flags.seeds,
        jobs=flags.jobs,
        resume=flags.resume,
    )
    say(
        f"Runs and table.json are in {flags.out}; look at them with: headwater report {quote(str(flags.out))}"
    )


def study(argv: list[str]) -> None:
    """Run what is missing of the runs that a TOML file describes, as far as time allows."""
    flags = parse(StudyFlags, argv, study)
    from headwater.train import study as run

    done = run(flags.recipe, flags.out, minutes=flags.minutes, whole=flags.whole)
    if done.finished:
        folder = quote(str(done.folder))
        look = f"headwater report {folder}, and headwater scaling {folder} for three sizes or more"
        say(f"Runs and table.json are in {done.folder}; look at them with: {look}")


def plan(argv: list[str]) -> None:
    """Say what a run will need on each rank: memory, bytes between stages, bubble. Starts nothing."""
    argv = ["--config", *argv] if argv and not argv[0].startswith("-") else argv
    where = peek(argv, Where())
    flags = parse(
        PlanFlags, argv, plan, PlanFlags(settings=base_config(where, where.out / "config.json"))
    )
    settings = check(sized(flags.settings, argv))
    from headwater.train.data.tokenizer import expected_vocabulary
    from headwater.train.distributed.plan import describe, make_plan
    from headwater.train.run import named_model

    with user_values():
        model = named_model(
            settings.model, 1 if settings.model.vocab_size else expected_vocabulary(settings.data)
        )
        made = make_plan(settings, model, flags.world, half=flags.gpu, fused=flags.gpu)
    say(describe(made, flags.memory, settings.train.checkpoint_activations))


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
    """Compare the plain residual with Attention Residuals on this machine: three to seven minutes on two cores."""
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
