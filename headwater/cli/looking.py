"""Commands that look: at runs, at residuals, inside a model, at this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headwater.cli.flags import (
    DoctorFlags,
    InspectFlags,
    ReportFlags,
    ResidualsFlags,
    ScalingFlags,
)
from headwater.cli.models import check_device, is_transformers, load_opened, say
from headwater.cli.parser import parse
from headwater.errors import UserError, user_values
from headwater.runs.tables import Table, plain


def report(argv: list[str]) -> None:
    """Write one HTML page about runs: loss curves, the table, who reads whom along the depth."""
    flags = parse(ReportFlags, argv, report)
    runs, models = apart(flags.folders, flags.prompt, flags.device)
    out = flags.out or (flags.folders[0] / "report.html" if models else None)
    say(f"Report: {make_report(runs, out, models)}")


def make_report(folders: list[Path], out: Path | None, models: Sequence[Any] = ()) -> Path:
    from headwater.analyze.report import write_report

    with user_values():
        return write_report(folders, out, models=models)


def apart(folders: Sequence[Path], prompt: str, device: str) -> tuple[list[Path], list[Any]]:
    """Part folders of runs from transformers models, and make a run of each model: one forward pass
    over the prompt."""
    models = [folder for folder in folders if is_transformers(folder)]
    if not models:
        return list(folders), []
    check_device(device)
    from headwater.analyze.inspector import inspect as look
    from headwater.analyze.prompted import prompted_run

    passes = []
    for folder in models:
        model, tokenizer, encode = load_opened(folder, device)
        name, tokens = folder.resolve().name, encode(prompt)
        inspection = look(model, tokens, tokenizer=tokenizer, name=name, removals="none")
        config = model.config.get_text_config()
        shape = {"dim": config.hidden_size, "layers": config.num_hidden_layers}
        passes.append(prompted_run(inspection, **shape))
    return [folder for folder in folders if folder not in models], passes


def residuals(argv: list[str]) -> None:
    """Print the table of residuals, and the options of named ones; or --check your own."""
    flags = parse(ResidualsFlags, argv, residuals)
    with user_values():
        from headwater.analyze.table import markdown, print_options, print_table, residual_table

        if flags.check:
            check(flags.residuals)
            return
        rows = residual_table(flags.residuals or None, dim=flags.dim, layers=flags.layers)
        if flags.markdown:
            say(markdown(rows).rstrip())
        else:
            print_table(rows)
            print_options(flags.residuals)


def check(specs: Sequence[str]) -> None:
    """Print a line for each check of each residual, and each fault in full once."""
    from headwater.analyze import check_residual
    from headwater.analyze.contract import CHECKS
    from headwater.residuals import names

    faults, complete = 0, True
    for spec in specs or names():
        say(spec)
        checks = check_residual(spec)
        # A fault that a check has named already is not written out again.
        words = {"": "ok"}
        for name, fault in checks.items():
            say(f"  {name:<10} {words.get(fault, fault)}")
            words.setdefault(fault, f"as {name}")
        faults += len(words) - 1
        complete = complete and len(checks) == len(CHECKS)
    if faults:
        rest = "" if complete else ". The missing checks run once the others pass"
        failed = "1 check failed" if faults == 1 else f"{faults} checks failed"
        raise UserError(f"{failed}. Fix the lines above that do not say ok{rest}")


def scaling(argv: list[str]) -> None:
    """Fit loss against compute for each residual, and print how much compute each saves."""
    flags = parse(ScalingFlags, argv, scaling)
    with user_values():
        from headwater.analyze.rates import at_rate, rates_by_budget
        from headwater.analyze.scaling import compare_runs
        from headwater.analyze.scaling_points import operations
        from headwater.analyze.scaling_report import table, write_plot
        from headwater.runs.record import beside, read_runs

        runs = read_runs(list(flags.folders))
        fitted = at_rate(runs, flags.lr)
        curves = compare_runs(fitted, flags.baseline)
        say(table(curves, flags.baseline))
        for remark in remarks(runs if flags.lr == "best" else fitted, fitted):
            say(remark)
        if different := confounded(curves, best=flags.lr == "best"):
            say(f"Settings differ beyond the residual, and explain a part of it too: {different}")
        if flags.lr == "best":
            say(f"Learning rates, by operations:\n{rates_by_budget(runs, operations)}")
        out = beside(list(flags.folders), "scaling.svg") if flags.out is None else flags.out
        say(f"Plot: {write_plot(curves, flags.baseline, out)}")


def remarks(runs: Sequence[Any], fitted: Sequence[Any]) -> Iterator[str]:
    """Say which runs a fit leaves out, and which it counts although their schedule changed."""
    from headwater.runs.record import number

    losses = [number((run.summary or {}).get("bits_per_byte")) for run in runs]
    if missing := losses.count(None):
        yield f"Left out, as they have not finished or diverged: {missing} of {len(runs)} runs"
    if extended := [run.name for run in fitted if run.summary and run.extended]:
        names = ", ".join(extended)
        yield f"Counted, though they went on to other steps than planned, under no single schedule: {names}"


def confounded(curves: Sequence[Any], *, best: bool) -> str:
    """Name the settings besides the residual in which curves differ from the baseline's."""
    sentences = []
    for curve in curves:
        # Who asks for the best rates knows that the rates differ.
        keys = [key for key in curve.confounders if not (best and key == "optim.lr")]
        if keys:
            sentences.append(f"{curve.residual} in {', '.join(keys)}")
    return "; ".join(sentences)


def inspect(argv: list[str]) -> None:
    """Look inside a model as it reads a prompt: one HTML page, or --serve it with a prompt box."""
    flags = parse(InspectFlags, argv, inspect)
    if len(flags.models) > 2:
        raise UserError(f"give one model or two; got {len(flags.models)}")
    check_device(flags.device)
    models = flags.models
    if models == (Path("demo"),) and not models[0].exists():
        models = (Path("demo/standard"), Path("demo/attnres-block"))
    from headwater.analyze.inspector import Inspection
    from headwater.analyze.inspector import inspect as run
    from headwater.analyze.inspector.serve import serve

    loaded = [load_opened(folder, flags.device) for folder in models]
    # Folders are named shortly unless both have the same name.
    short = len({folder.name for folder in models}) == len(models)
    names = [folder.name if short and folder.name else str(folder) for folder in models]

    def look(prompt: str) -> list[Inspection]:
        options: dict[str, Any] = {"top": flags.top, "removals": flags.removals}
        return [
            run(model, encode(prompt), tokenizer=tokenizer, name=name, **options)
            for (model, tokenizer, encode), name in zip(loaded, names)
        ]

    # Bytes that are no text arrive as surrogates.
    prompt = flags.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if flags.serve:
        serve(look, prompt, flags.port, say)
        return
    first, *other = look(prompt)
    say(f"Inspector: {first.save(flags.out, *other)}")


def doctor(argv: list[str]) -> None:
    """Say what this machine has and how headwater runs on it; fails if something is in the way."""
    parse(DoctorFlags, argv, doctor)
    from headwater.doctor import examine

    findings = examine()
    rows = []
    for name, state, problem in findings:
        rows.append([f"! {name}" if problem else f"  {name}", state])
    say(plain(Table(["", ""], rows)))
    if problems := sum(problem for _, _, problem in findings):
        count = "1 problem" if problems == 1 else f"{problems} problems"
        raise UserError(f"{count}. Fix the lines above that begin with an exclamation mark")
