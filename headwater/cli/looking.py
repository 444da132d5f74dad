"""Commands that look: at runs, at residuals, inside a model, at this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.cli.flags import (
    DoctorFlags,
    InspectFlags,
    ReportFlags,
    ResidualsFlags,
    ScalingFlags,
    parse,
)
from headwater.cli.models import check_device, is_transformers, load_any, say
from headwater.errors import UserError, user_values


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


def matrix(argv: list[str]) -> None:
    """Write one HTML page with the depth-mixing maps of runs side by side, and their measures."""
    flags = parse(ReportFlags, argv, matrix)
    runs, models = apart(flags.folders, flags.prompt, flags.device)
    with user_values():
        from headwater.analyze.matrix import write_matrix

        out = flags.out or (flags.folders[0] / "matrix.html" if models else None)
        say(f"Matrices: {write_matrix(runs, out, models=models)}")


def apart(folders: Sequence[Path], prompt: str, device: str) -> tuple[list[Path], list[Any]]:
    """Folders of runs; and each converted transformers model as a run of one forward pass over the prompt."""
    theirs = [folder for folder in folders if is_transformers(folder)]
    if not theirs:
        return list(folders), []
    check_device(device)
    from headwater.analyze.inspector import inspect as look
    from headwater.analyze.prompted import prompted_run

    found = []
    for folder in theirs:
        model, tokenizer, encode = load_any(folder, device)
        inspection = look(
            model, encode(prompt), tokenizer=tokenizer, name=folder.resolve().name, removals="none"
        )
        text = model.config.get_text_config()
        found.append(prompted_run(inspection, dim=text.hidden_size, layers=text.num_hidden_layers))
    return [folder for folder in folders if folder not in theirs], found


def residuals(argv: list[str]) -> None:
    """Print residuals: formula, parameters, memory, traffic, start; of named ones the options; or --check your own."""
    flags = parse(ResidualsFlags, argv, residuals)
    with user_values():
        from headwater.analyze.table import markdown, print_options, print_table, residual_table

        if flags.check:
            if unused := [
                word
                for word in argv
                if word.partition("=")[0] in ("--dim", "--layers", "--markdown")
            ]:
                raise UserError(
                    f"--check looks at 4 layers of width 32, and has no table: leave out {unused[0]}"
                )
            check(flags.residuals)
            return
        rows = residual_table(flags.residuals or None, dim=flags.dim, layers=flags.layers)
        if flags.markdown:
            say(markdown(rows).rstrip())
        else:
            print_table(rows)
            print_options(flags.residuals)


def check(specs: Sequence[str]) -> None:
    """A line for each check of each residual, in full where a fault is first seen; fails if anything is wrong."""
    from headwater.analyze import check_residual
    from headwater.analyze.contract import CHECKS
    from headwater.residuals import names

    failed, rest = 0, ""
    for spec in specs or names():
        found, first = check_residual(spec), {"": "ok"}
        say(spec)
        for name, wrong in found.items():
            say(f"  {name:<10} {first.get(wrong, wrong)}")
            first.setdefault(wrong, f"as {name}")
        failed += len(first) - 1
        rest = rest if len(found) == len(CHECKS) else ". The checks that are missing follow then"
    if failed:
        raise UserError(f"{failed} of these must be mended: the lines without ok{rest}")


def scaling(argv: list[str]) -> None:
    """Fit loss against compute for each residual, and say how much compute each is worth."""
    flags = parse(ScalingFlags, argv, scaling)
    with user_values():
        from headwater.analyze.rates import at_rate, rates_by_budget
        from headwater.analyze.scaling import compare_runs
        from headwater.analyze.scaling_points import operations
        from headwater.analyze.scaling_report import table, write_plot
        from headwater.runs.record import beside, number, read_runs

        runs = read_runs(list(flags.folders))
        taken = at_rate(runs, flags.lr)
        found = compare_runs(taken, flags.baseline)
        say(table(found, flags.baseline))
        asked = runs if flags.lr == "best" else taken
        if missing := sum(
            number((run.summary or {}).get("bits_per_byte")) is None for run in asked
        ):
            say(f"Left out, as they have not finished or diverged: {missing} of {len(asked)} runs")
        if extended := ", ".join(run.name for run in taken if run.summary and run.extended):
            say(
                f"Counted, though they went on to other steps than planned, under no single schedule: {extended}"
            )
        told = {"optim.lr"} if flags.lr == "best" else set()
        apart = {
            scaling.residual: [key for key in scaling.confounders if key not in told]
            for scaling in found
        }
        if shared := "; ".join(
            f"{name} of {', '.join(keys)}" for name, keys in apart.items() if keys
        ):
            say(
                f"Settings differ beyond the residual, so that what it is worth is worth of them too: {shared}"
            )
        if flags.lr == "best":
            say(f"Learning rates, by operations:\n{rates_by_budget(runs, operations)}")
        out = beside(list(flags.folders), "scaling.svg") if flags.out is None else flags.out
        say(f"Plot: {write_plot(found, flags.baseline, out)}")


def inspect(argv: list[str]) -> None:
    """Look inside a model as it reads a prompt: one HTML page, or --serve it with a prompt box."""
    flags = parse(InspectFlags, argv, inspect)
    if not 1 <= len(flags.models) <= 2:
        raise UserError(
            f"give one model or two, as in `headwater inspect runs/first`; got {len(flags.models)}"
        )
    if flags.top < 1:
        raise UserError(f"--top must be at least 1, got {flags.top}")
    check_device(flags.device)
    from headwater.analyze.inspector import Inspection
    from headwater.analyze.inspector import inspect as run
    from headwater.analyze.inspector.serve import serve

    loaded = [load_any(folder, flags.device) for folder in flags.models]
    short = len({folder.name for folder in flags.models}) == len(flags.models)
    names = [folder.name if short and folder.name else str(folder) for folder in flags.models]

    def look(prompt: str) -> list[Inspection]:
        options: dict[str, Any] = {"top": flags.top, "removals": flags.removals}
        return [
            run(model, encode(prompt), tokenizer=tokenizer, name=name, **options)
            for (model, tokenizer, encode), name in zip(loaded, names)
        ]

    prompt = flags.prompt.encode("utf-8", "surrogateescape").decode(
        "utf-8", "replace"
    )  # bytes that are no text
    if flags.serve:
        serve(look, prompt, flags.port, say)
        return
    first, *other = look(prompt)
    say(f"Inspector: {first.save(flags.out, *other)}")


def doctor(argv: list[str]) -> None:
    """Say what this machine has, and how headwater will run on it; fails if something stands in the way."""
    parse(DoctorFlags, argv, doctor)
    from headwater.doctor import examine

    findings = examine()
    width = max(len(name) for name, _, _ in findings)
    say(
        "\n".join(
            f"{'!' if problem else ' '} {name:<{width}}  {state}"
            for name, state, problem in findings
        )
    )
    if problems := sum(problem for _, _, problem in findings):
        raise UserError(f"{problems} of these must be mended: the lines with an exclamation mark")
