"""The origin of a report's numbers: model, corpus, optimizer, versions, runs and commands."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwater.analyze.markup import count, definitions, text, unique
from headwater.errors import command
from headwater.runs.files import read_object
from headwater.runs.groups import Group, noun, once
from headwater.runs.launch import most_at_a_time
from headwater.runs.record import COMPARISON, Record, RecordedRun, find_runs, section
from headwater.runs.tables import Table

BYTES = 320  # the largest vocabulary of a model of bytes, unless its settings say another


def facts(groups: list[Group]) -> str:
    """Write what the runs of the page have in common, with values that differ side by side.

    Facts that no run knows are left out: a model that reads a prompt has no corpus.
    """
    runs = [run for group in groups for run in group.runs]
    tokens = [count(total) for group in groups if (total := group.tokens()) is not None]
    written = max(run.written for run in runs)

    def together(describe: Callable[[RecordedRun], str]) -> str:
        descriptions = [words for words in map(describe, runs) if words]
        return " or ".join(unique(descriptions, 3))

    rows = {
        "Model": models(runs),
        "Corpus": together(corpus),
        "Training": together(training),
        "Optimizer": together(optimizer),
        "Tokens": " or ".join(unique(tokens, 3)),
        "Seeds": f"{_seeds(groups)} per {noun(groups)}",
        "Runs": _finished(groups, runs),
        "Device": together(lambda run: made_with(run, "device")),
        "Versions": together(versions),
        "Last written": written.strftime("%Y-%m-%d %H:%M UTC"),
    }
    # A fact that nobody knows stays empty, and its row goes.
    if rows["Tokens"]:
        rows["Tokens"] += " per run"
    if not written.timestamp():  # an archive may drop times
        rows["Last written"] = ""
    return definitions({name: words for name, words in rows.items() if words})


def _seeds(groups: list[Group]) -> str:
    counts = sorted(len(once(group.runs)) for group in groups)
    return " to ".join(dict.fromkeys([str(counts[0]), str(counts[-1])]))


def _finished(groups: list[Group], runs: list[RecordedRun]) -> str:
    """Count the finished runs, and say how many were made side by side."""
    finished = sum(run.summary is not None for run in runs)
    words = f"{finished} of {len(runs)} finished"
    if len(runs) == 1:
        return words
    at_a_time = most_at_a_time(group.beside for group in groups)
    if at_a_time is None:
        return f"{words}; how many at a time is unknown"
    return f"{words}, one at a time" if at_a_time == 1 else f"{words}, up to {at_a_time} at a time"


def models(runs: list[RecordedRun]) -> str:
    """Name the sizes of the models, and their parts if those are not attention alone."""
    # One size is written in words, several side by side.
    settings = [section(run.config, "model") for run in runs]
    shapes = [(model.get("layers", "?"), model.get("dim", "?")) for model in settings]
    sizes = unique([f"{layers} × {width}" for layers, width in shapes], 8)
    words = f"{', '.join(sizes)} (layers × width)"
    if len(sizes) == 1:
        layers, width = shapes[0]
        words = f"{layers} layers, width {width}"
    patterns = unique(list(map(pattern, settings)), 3)
    return words if patterns == ["attention"] else f"{words}, {' or '.join(patterns)}"


def pattern(model: Record) -> str:
    experts = f", {model['experts']} experts" if model.get("experts") else ""
    return f"{model.get('pattern') or 'attention'}{experts}"


def corpus(run: RecordedRun) -> str:
    """Name the text of a run, its tokens and the beginning of its hash."""
    source = section(run.config, "data").get("source")
    names = []
    if isinstance(source, list):
        names = [Path(str(name)).name for name in source]
    digest = str(run.corpus.get("source_hash") or "")[:12]
    return _listed([*unique(names, 3), tokens(run), digest])


def tokens(run: RecordedRun) -> str:
    """Name the kind of the tokens and, unless they are bytes, the size of the vocabulary.

    The setting may not fit tokens that were made before. Where the run's own tokenizer is gone, the
    setting "bytes" is believed only of a vocabulary that a model of bytes would have.
    """
    setting = section(run.config, "data").get("tokenizer")
    vocabulary = section(run.config, "model").get("vocab_size")
    vocabulary = vocabulary if isinstance(vocabulary, int) else 0
    believed = ("bpe",) if vocabulary > BYTES else ("bytes", "bpe")
    kind = run.tokenizer or (setting if setting in believed else "")
    size = f"a vocabulary of {vocabulary:,}" if vocabulary and kind != "bytes" else ""
    return _listed([f"{kind} tokens" if kind else "", size])


def training(run: RecordedRun) -> str:
    settings = section(run.config, "train")
    batch, context = settings.get("batch_size"), section(run.config, "model").get("context")
    if not settings.get("steps"):
        return ""
    windows = f" of {batch} × {context} tokens" if batch and context else ""
    return f"{settings['steps']} steps{windows}"


def optimizer(run: RecordedRun) -> str:
    settings = section(run.config, "optim")
    lr = settings.get("lr")
    rate = f"learning rate {lr:g}" if isinstance(lr, int | float) else ""
    name, schedule = (str(settings.get(key) or "") for key in ("optimizer", "schedule"))
    return _listed([name, rate, schedule])


def versions(run: RecordedRun) -> str:
    packages = [name for name in ("headwater", "code", "torch") if made_with(run, name)]
    return _listed([f"{name} {made_with(run, name)}" for name in packages])


def made_with(run: RecordedRun, key: str) -> str:
    return str((run.summary or {}).get(key) or "")


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(filter(None, parts))


def commands(folders: list[Path]) -> list[str]:
    """Write for each folder the command that makes its runs again, from the folder's settings."""
    return [_command(folder) for folder in folders]


def _command(folder: Path) -> str:
    # A page shows no path of somebody's machine: a folder elsewhere is named without its place.
    below = folder.parts and not folder.is_absolute() and ".." not in folder.parts
    name = folder.as_posix() if below else folder.resolve().name
    # Residuals of other packages are imported by name before the command knows them.
    modules = {module_of(run) for run in find_runs([folder])}
    plugins = [
        flag for module in sorted(modules - {"", "__main__"}) for flag in ("--plugin", module)
    ]
    # The folder is a run, a comparison, or a study, whose recipe is not in it.
    if (folder / "config.json").is_file():
        line = command("train", config=f"{name}/config.json", out=f"{name}-again")
    elif (folder / COMPARISON).is_file():
        saved = read_object(folder / COMPARISON)
        lists = {key: saved.get(key) for key in ("residuals", "seeds")}
        line = command("compare", config=f"{name}/settings.json", **lists, out=f"{name}-again")
    else:
        line = command("study", "RECIPE", out=f"{name}-again")
    return " ".join([line, *plugins])


def module_of(run: Path) -> str:
    """Return the module that a run's command imports for its residual; "" for headwater's own."""
    residual = str(section(read_object(run / "config.json"), "model").get("residual"))
    module = residual.partition(":")[0].partition("@")[2]
    return module if all(part.isidentifier() for part in module.split(".")) else ""


def command_lines(lines: Sequence[str]) -> str:
    return "".join(f"<pre><code>{text(line)}</code></pre>" for line in lines)


def settings_table(groups: list[Group]) -> str:
    """Write every setting but the residual, with different values side by side."""
    rows = {}
    for key in sorted({key for group in groups for key in group.settings}):
        values = [group.settings.get(key, "unset") for group in groups]
        rows[key] = " or ".join(unique(values, 3))
    return definitions(rows)


RUN_COLUMNS = (
    "Folder", "Residual", "Seed", "Steps", "Loss", "Side by side", "Device", "torch", "headwater"
)  # fmt: skip


def runs_table(groups: list[Group]) -> Table:
    """List every run behind the page."""
    rows = []
    for group in groups:
        rows += [_run_row(run, group.label) for run in group.runs]
    return Table(RUN_COLUMNS, rows)


def _run_row(run: RecordedRun, label: str) -> list[str]:
    loss = run.final("loss")
    values = [
        run.name,
        label,
        run.seed,
        count(run.final("steps")),
        None if loss is None else f"{loss:.4f}",
        run.beside or "unknown",
        *(made_with(run, key) or None for key in ("device", "torch", "headwater")),
    ]
    return ["—" if value is None else str(value) for value in values]


RESULTS = (
    "loss", "bits_per_byte", "parameters", "flops_per_token", "tokens", "seconds", "peak_memory_bytes"
)  # fmt: skip


def results_data(group: Group) -> list[dict[str, Any]]:
    """List the numbers of each run, for whoever downloads them from the page."""
    rows = []
    for run in group.runs:
        row: dict[str, Any] = {"seed": run.seed, "finished": run.summary is not None}
        row.update((key, run.final(key)) for key in RESULTS)
        rows.append(row)
    return rows
