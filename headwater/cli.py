"""The `headwater` command. Thin: it reads flags, calls one function, and turns a user's error into one message.

Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from headwater.errors import UserError, nearest, user_values
from headwater.flags import (
    DEMO,
    CompareFlags,
    ConvertFlags,
    DemoFlags,
    EvalFlags,
    ExportFlags,
    GenerateFlags,
    PlanFlags,
    ReportFlags,
    ResidualsFlags,
    TrainFlags,
    VerifyFlags,
    Where,
)
from headwater.models.config import SIZES
from headwater.train.config import Config, load_file
from headwater.train.folder import read_json, write_json

T = TypeVar("T")


def train(argv: list[str]) -> None:
    """Train one model."""
    where = peek(argv, Where())
    if where.resume and not (where.out / "config.json").exists():
        raise UserError(f"there is no run at {where.out} to resume: check --out, or leave --resume out to start one")
    base = base_config(where, where.out / "config.json")
    flags = parse(TrainFlags, argv, train, TrainFlags(settings=base))
    settings = sized(flags.settings, base, argv)
    from headwater.train.loop import train as run

    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # torchrun started us anew after a failure
    summary = run(settings, flags.out, resume=flags.resume or again)
    if int(os.environ.get("RANK", "0")) == 0:
        say(
            f"{flags.out}: {summary['bits_per_byte']:.4f} bits per byte on held-out text after {summary['steps']} steps"
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
    if (flags.settings.model.residual, flags.settings.train.seed) != (base.model.residual, base.train.seed):
        raise UserError("compare takes --residuals and --seeds, several of each, in place of --residual and --seed")
    from headwater.train.compare import compare as run

    settings = sized(flags.settings, base, argv)
    run(settings, flags.out, residuals=flags.residuals, seeds=flags.seeds, jobs=flags.jobs, resume=flags.resume)
    say(f"Runs and table.json are in {flags.out}; look at them with: headwater report {flags.out}")


def report(argv: list[str]) -> None:
    """Write one HTML page about runs: loss curves, the table, who reads whom along the depth."""
    flags = parse(ReportFlags, argv, report)
    say(f"Report: {make_report(list(flags.folders), flags.out)}")


def matrix(argv: list[str]) -> None:
    """Write one HTML page with the depth-mixing maps of runs side by side, and their measures."""
    flags = parse(ReportFlags, argv, matrix)
    with user_values():
        from headwater.analyze.matrix import write_matrix

        say(f"Matrices: {write_matrix(list(flags.folders), flags.out)}")


def residuals(argv: list[str]) -> None:
    """Print every residual: formula, parameters, stored activations, traffic, and how it starts."""
    flags = parse(ResidualsFlags, argv, residuals)
    with user_values():
        from headwater.analyze.table import markdown, print_table, residual_table

        rows = residual_table(flags.residuals or None, dim=flags.dim, layers=flags.layers)
        if flags.markdown:
            say(markdown(rows).rstrip())
        else:
            print_table(rows)


def generate(argv: list[str]) -> None:
    """Continue a prompt with a trained model."""
    flags = parse(GenerateFlags, argv, generate)
    import torch

    from headwater.models.generate import generate as run
    from headwater.train.checkpoint import load_model

    text = flags.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no text
    check_device(flags.device)
    model, tokenizer = load_model(flags.folder.resolve(), flags.device)
    prompt = tokenizer.encode(text).tolist() or [tokenizer.end_of_text]
    with user_values():
        tokens = run(
            model,
            torch.tensor([prompt], device=flags.device),
            flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            seed=flags.seed,
            use_cache=model.residual.token_local,
            stop=tokenizer.end_of_text,
        )
    say(tokenizer.decode(tokens[0].tolist()))


def convert(argv: list[str]) -> None:
    """Swap the residual of a Hugging Face checkpoint, or export a run to that format."""
    flags = parse(ConvertFlags, argv, convert)
    needs("transformers", "hf")
    from headwater import hf
    from headwater.hf.folder import check_out, convert_folder, is_transformers, write_model

    if is_transformers(flags.folder):
        say(str(convert_folder(flags.folder, flags.out, flags.residual)))
        return
    check_out(flags.out)
    model, tokenizer = load_exported(flags.folder)
    if flags.residual is not None:
        say(str(hf.convert(model, flags.residual)))
    write_model(model, tokenizer, flags.out)
    say(f"{flags.out}: a {type(model).__name__} with the weights of {flags.folder}")


def verify(argv: list[str]) -> None:
    """Compare two Hugging Face checkpoints: KL, largest logit difference. Fails if they are not equal."""
    flags = parse(VerifyFlags, argv, verify)
    needs("transformers", "hf")
    from headwater.hf.folder import verify_folders

    result = verify_folders(*flags.folders, flags.tokens, flags.seed)
    if not result.equal:
        raise UserError(str(result))
    say(str(result))


def evaluate(argv: list[str]) -> None:
    """Score a checkpoint on tasks of lm-evaluation-harness: a table, and a JSON file beside the checkpoint."""
    flags = parse(EvalFlags, argv, evaluate, name="eval")
    needs("transformers", "hf")
    needs("lm_eval", "eval")
    tasks = [task for word in flags.tasks for task in word.split(",") if task]
    if not tasks:
        raise UserError("--tasks names no task")
    check_device(flags.device)
    from headwater.hf.evaluate import evaluate as run
    from headwater.hf.evaluate import table
    from headwater.hf.folder import is_transformers, load_with_tokenizer

    model, tokenizer = (load_with_tokenizer if is_transformers(flags.folder) else load_exported)(flags.folder)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about how it is called, which is our doing
