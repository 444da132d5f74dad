"""Where the numbers come from: model, corpus, optimizer, versions, the runs, and the command that makes them again."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.analyze.markup import count, definitions, text, unique
from headwater.runs.files import read_object
from headwater.runs.groups import Group, noun, once
from headwater.runs.launch import most_at_a_time
from headwater.runs.record import Record, RecordedRun, find_runs, section
from headwater.runs.tables import Table

BYTES = 320  # what a model has at most for bytes and the end of a text, unless it is told otherwise


def facts(groups: list[Group]) -> str:
    """What every run of the page has in common; values that differ stand side by side. What none says is left out: a
    model that reads a prompt has no corpus."""
    runs = [run for group in groups for run in group.runs]
    counts = {len(once(group.runs)) for group in groups}
    last = max(run.written for run in runs)
    seen = unique([count(tokens) for group in groups if (tokens := group.tokens()) is not None], 3)

    def each(describe: Callable[[RecordedRun], str]) -> str:
        return " or ".join(unique([said for run in runs if (said := describe(run))], 3))

    rows = {
        "Model": models(runs),
        "Corpus": each(corpus),
        "Training": each(training),
        "Optimizer": each(optimizer),
        "Tokens": f"{' or '.join(seen)} per run" if seen else "",
        "Seeds": f"{plain_range(counts)} per {noun(groups)}",
        "Runs": f"{sum(run.summary is not None for run in runs)} of {len(runs)} finished{side_by_side(groups, runs)}",
        "Device": each(lambda run: made_with(run, "device")),
        "Versions": each(versions),
        "Last written": last.strftime("%Y-%m-%d %H:%M UTC")
        if last.timestamp()
        else "",  # archives may drop times
    }
    return definitions({name: said for name, said in rows.items() if said})


def plain_range(counts: set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def side_by_side(groups: list[Group], runs: list[RecordedRun]) -> str:
    if len(runs) == 1:
        return ""
    if (most := most_at_a_time(group.beside for group in groups)) is None:
        return "; how many at a time is unknown"
    return ", one at a time" if most == 1 else f", up to {most} at a time"


def models(runs: list[RecordedRun]) -> str:
    """Their sizes, and their parts where those are not attention alone."""
    found = [section(run.config, "model") for run in runs]
    sizes = unique([f"{each.get('layers', '?')} × {each.get('dim', '?')}" for each in found], 8)
    layers, width = sizes[0].split(" × ")
    shape = (
        f"{layers} layers, width {width}"
        if len(sizes) == 1
        else f"{', '.join(sizes)} (layers × width)"
    )
    patterns = unique([pattern(each) for each in found], 3)
    return shape if patterns == ["attention"] else f"{shape}, {' or '.join(patterns)}"


def pattern(model: Record) -> str:
    experts = f", {model['experts']} experts" if model.get("experts") else ""
    return f"{model.get('pattern') or 'attention'}{experts}"


def corpus(run: RecordedRun) -> str:
    found = section(run.config, "data")
    source = found.get("source")
    names = [Path(str(name)).name for name in source] if isinstance(source, list) else []
    digest = str(run.corpus.get("source_hash") or "")[:12]
    return ", ".join(part for part in (", ".join(unique(names, 3)), tokens(run), digest) if part)


def tokens(run: RecordedRun) -> str:
    """Their kind and, but of bytes, the model's vocabulary. The settings' kind is not that of tokens which were made
    before: where the run's own tokenizer is gone, bytes are believed only of a vocabulary that they would have."""
    kind, vocabulary = (
        section(run.config, "data").get("tokenizer"),
        section(run.config, "model").get("vocab_size"),
    )
    vocabulary = vocabulary if isinstance(vocabulary, int) else 0
    believed = (
        ("bpe",) if vocabulary > BYTES else ("bytes", "bpe")
    )  # any other is where it was taken from
    kind = run.tokenizer or (kind if kind in believed else "")
    several = f"a vocabulary of {vocabulary:,}" if vocabulary and kind != "bytes" else ""
    return ", ".join(part for part in (f"{kind} tokens" if kind else "", several) if part)


def training(run: RecordedRun) -> str:
    settings, context = section(run.config, "train"), section(run.config, "model").get("context")
    batch = settings.get("batch_size")
    each = f" of {batch} × {context} tokens" if batch and context else ""
    return f"{settings['steps']} steps{each}" if settings.get("steps") else ""


def optimizer(run: RecordedRun) -> str:
    settings = section(run.config, "optim")
    parts = [
        str(settings.get("optimizer") or ""),
        f"learning rate {settings['lr']:g}" if isinstance(settings.get("lr"), int | float) else "",
        str(settings.get("schedule") or ""),
    ]
    return ", ".join(part for part in parts if part)


def versions(run: RecordedRun) -> str:
    known = [(name, made_with(run, name)) for name in ("headwater", "code", "torch")]
    return ", ".join(f"{name} {value}" for name, value in known if value)


def made_with(run: RecordedRun, key: str) -> str:
    return str((run.summary or {}).get(key) or "")


def commands(folders: list[Path]) -> list[str]:
    """One line for each folder that makes its runs again, from the folder's own record of its settings: where the page
    was made if that was asked for a folder below, else beside the folder, as a page tells nobody's machine."""
    return [command(folder) for folder in folders]


def command(folder: Path) -> str:
    below = folder.parts and not folder.is_absolute() and ".." not in folder.parts
    name = folder.as_posix() if below else folder.resolve().name
    modules = {module_of(run) for run in find_runs([folder])}
    own = [word for module in sorted(modules - {"", "__main__"}) for word in ("--plugin", module)]
    if (folder / "config.json").is_file():
        return shlex.join(
            [
                "headwater",
                "train",
                "--config",
                f"{name}/config.json",
                "--out",
                f"{name}-again",
                *own,
            ]
        )
    if not (folder / "compare.json").is_file():
        return shlex.join(["headwater", "study", "RECIPE", "--out", f"{name}-again", *own])
    saved = read_object(folder / "compare.json")

    def words(key: str) -> list[str]:
        return [str(item) for item in saved[key]] if isinstance(saved.get(key), list) else []

    flags = [
        "--config",
        f"{name}/settings.json",
        "--residuals",
        *words("residuals"),
        "--seeds",
        *words("seeds"),
    ]
    return shlex.join(["headwater", "compare", *flags, "--out", f"{name}-again", *own])


def module_of(run: Path) -> str:
    """What a run's command has to import for its residual, by the run's own settings; headwater's are in none."""
    residual = str(section(read_object(run / "config.json"), "model").get("residual"))
    module = residual.partition(":")[0].partition("@")[2]
    return module if all(part.isidentifier() for part in module.split(".")) else ""


def command_lines(lines: list[str]) -> str:
    return "".join(f"<pre><code>{text(line)}</code></pre>" for line in lines)


def settings_table(groups: list[Group]) -> str:
    """Every setting of the configuration but the residual; differing values are joined."""
    keys = sorted({key for group in groups for key in group.settings})
    return definitions(
        {
            key: " or ".join(unique([g.settings.get(key, "unset") for g in groups], 3))
            for key in keys
        }
    )


RUN_COLUMNS = (
    "Folder", "Residual", "Seed", "Steps", "Loss", "Side by side", "Device", "torch", "headwater"
)  # fmt: skip


def runs_table(groups: list[Group]) -> Table:
    """Every run behind the page."""
    rows = []
    for group in groups:
        rows += [_run_row(run, group.label) for run in group.runs]
    return Table(RUN_COLUMNS, rows)


def _run_row(run: RecordedRun, label: str) -> list[str]:
    loss, summary = run.final("loss"), run.summary or {}
    values = [
        run.name,
        label,
        run.seed,
        count(run.final("steps")),
        None if loss is None else f"{loss:.4f}",
        run.beside or "unknown",
        summary.get("device"),
        summary.get("torch"),
        summary.get("headwater"),
    ]
    return ["—" if value is None else str(value) for value in values]


def results_data(group: Group) -> list[dict[str, Any]]:
    """The numbers of each run, for whoever downloads them from the page."""
    keys = (
        "loss",
        "bits_per_byte",
        "parameters",
        "flops_per_token",
        "tokens",
        "seconds",
        "peak_memory_bytes",
    )
    return [
        {"seed": run.seed, "finished": run.summary is not None}
        | {key: run.final(key) for key in keys}
        for run in group.runs
    ]
