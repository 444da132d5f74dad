"""A page for each registered residual: formula, start, cost, options, mixing matrix, differences, plain code."""

import inspect
import json
import re
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from command_page import wrapped
from mathematics import symbols, typeset

from benchmarks.tables import step_costs
from headwater.analyze.table import Row, residual_table
from headwater.residuals import entry, options_of
from headwater.runs.groups import Group, group_runs
from headwater.runs.record import read_runs
from headwater.runs.stats import Paired, pair
from tests.formulas import FORMULAS

ROOT = Path(__file__).parents[2]
DIFFERENCES = ROOT / "docs" / "explanation" / "implementations.md"
MATRICES = ROOT / "studies" / "mixing-matrices" / "results.json"
RUNS = ROOT / "studies" / "attention-residuals" / "runs"  # an archive of run folders a recipe
STARTS = {
    "exact": "It starts as the plain residual: every read is the same to the last digits.",
    "scaled": "It starts as the plain residual up to a scale, which the norm of the reader cancels, "
    "[down to its eps](../../guides/own-model.md#before-it-is-trained).",
    "different": "It does not start as the plain residual.",
}


def pages() -> dict[str, str]:
    """By address: the list of all residuals, and a page for each."""
    rows = {row.name: row for row in residual_table()}
    made = {f"reference/residuals/{name}.md": page(name, row) for name, row in rows.items()}
    return {"reference/residuals/index.md": index(list(rows.values())), **made}


def index(rows: list[Row]) -> str:
    lines = [
        "# Residuals\n",
        "Every residual that is registered. Each page has the formula, the options, the cost and a picture.",
        "[How to choose](../../start/choose.md) helps to pick one. [How to add one](../../guides/new-residual.md).\n",
        "At the start, a residual is `exact`: the plain one, to the last digits; `scaled`: the plain one",
        "[up to a scale](../../guides/own-model.md#before-it-is-trained); or `different`.\n",
        "| residual | formula | at start | paper |",
        "|---|---|---|---|",
    ]
    for row in rows:
        equations = "<br>".join(f"${equation}$" for equation in symbols(row.formula))
        paper = papers(entry(row.name).build.__doc__ or "")
        lines.append(f"| [{row.name}]({row.name}.md) | {equations} | {row.at_start} | {paper} |")
    return "\n".join(lines) + "\n"


def page(name: str, row: Row) -> str:
    known = entry(name)
    sections = [
        f"# {name}",
        typeset(known.formula),
        f"## Use it\n\n{usage(name)}",
        f"## In words\n\n{described(name)}",
        f"## Options\n\n{options(name)}",
        f"## At the start\n\n{STARTS[row.at_start]}",
        f"## Cost\n\n{costs(name, row)}",
        f"## Mixing matrix\n\n{picture(name)}",
        differences(name),
        f"## The formula as plain code\n\n{code(name)}",
        study(name),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def described(name: str) -> str:
    """The docstring after its formula: a paragraph for what starts with a label, papers as links. Sentences on options
    are left to their table."""
    known = entry(name)
    text = " ".join("\n".join(inspect.cleandoc(known.build.__doc__ or "").splitlines()[1:]).split())
    listed = "|".join((*known.options, *known.fixed)) or "-"
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)
    text = " ".join(
        line
        for line in sentences
        if not re.match(rf"(?:(?:Options|How it is)[^`]*)?`(?:{listed})`", line)
    )
    text = re.sub(
        r"(?<=\.) (?=(At initialisation|Cost|Left out|Options, |How it is computed)\b)",
        "\n\n",
        text,
    )
    labels = r"^(At initialisation|Cost|Left out|How it is computed): ([a-z]{2,})?"
    text = re.sub(labels, lambda m: f"**{m[1]}.** {(m[2] or '').capitalize()}", text, flags=re.M)
    return re.sub(
        r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text.replace("<", "&lt;")
    )


def papers(text: str) -> str:
    return ", ".join(
        f"[{number}](https://arxiv.org/abs/{number})"
        for number in re.findall(r"(\d{4}\.\d{5})", text)[-1:]
    )


def usage(name: str) -> str:
    return (
        f'```python\nimport headwater\n\nresidual = headwater.build("{name}", dim=64, sublayers=8)\n```\n\n'
        f"```bash\nheadwater residuals {name}\n```\n\n"
        f"In training: `headwater train --residual {name}`. "
        "[Own models](../../guides/own-model.md) and [Hugging Face models](../../guides/huggingface.md) take the same."
    )


def options(name: str) -> str:
    found = options_of(name)[1]
    if not found:
        return "None."
    lines = [
        f"| `{option.name}` | `{option.default}` | {option.takes} | {option.meaning.replace('<', '&lt;')} |"
        for option in found
    ]
    first = f"`{name}:{found[0].name}=...`"
    head = "| option | default | takes | means |\n|---|---|---|---|\n"
    return f"Options follow the name: {first}.\n\n" + wrapped(head + "\n".join(lines))


def costs(name: str, row: Row) -> str:
    counted = {
        "parameters a sublayer, in widths D": row.parameters,
        "kept at most, in tensors (tokens x D)": row.stored,
        "moved by a sublayer's read and write, fused": row.least,
        "moved, operator by operator": row.eager,
    }
    lines = [f"| {what} | {value:.3g} |" for what, value in counted.items()]
    measured = step_costs().get(name)
    for what, value in (measured or {}).items():
        lines.append(f"| {what} | {'not measured' if value is None else f'{value:.2f}'} |")
    note = "The first four are counted in the code, for 12 layers. "
    note += (
        "The others are measured steps, relative to `standard`"
        if measured
        else "Steps have not been measured yet"
    )
    return (
        "| what | how much |\n|---|---|\n"
        + "\n".join(lines)
        + f"\n\n{note} ([all of them](../../start/choose.md))."
    )


def differences(name: str) -> str:
    """The paragraph of the page about implementations that is about this one."""
    for names_of, text in re.findall(
        r"^\*\*([a-z, -]+)\.\*\* (.*?)(?=\n\n|\Z)", DIFFERENCES.read_text(), re.M | re.S
    ):
        if name in names_of.split(", "):
            moved = text.replace("](", "](../../explanation/")
            return f"## Where implementations differ\n\n{moved[0].upper()}{moved[1:]}"
    return ""


def code(name: str) -> str:
    source = inspect.getsource(FORMULAS[name])
    return (
        "Tests hold the class to this function. `x` is the embedding, `run(i, read)` a sublayer, `o` the options.\n\n"
        f"```py\n{source}```"
    )


def study(name: str) -> str:
    """What the runs of the study that are kept say of it; nothing where there are none."""
    rows = [
        [recipe, f"`{group.label}`", str(len(group.finished)), bits.text(), difference(group)]
        for recipe, group in groups()
        if group.residual.partition(":")[0] == name
        and (bits := group.final("bits_per_byte")) is not None
    ]
    if not rows:
        return ""
    head = ["recipe", "runs", "seeds", "bits per byte", "against the plain residual"]
    # Of the plain residual itself, or where none has the same settings
    columns = 5 if any(row[-1] for row in rows) else 4
    lines = [f"| {' | '.join(row[:columns])} |" for row in (head, ["---"] * 5, *rows)]
    words = "Verdicts are such that all of a recipe hold together; the study's tables judge each arm by itself."
    return (
        "## In the study\n\n"
        + "\n".join(lines)
        + f"\n\n{words} [All of it](../../results/study.md)."
    )


@cache
def groups() -> list[tuple[str, Group]]:
    """Of every recipe's runs, those that differ only by seed."""
    found: list[tuple[str, Group]] = []
    for archive in sorted(RUNS.glob("*.tar.xz")):
        with TemporaryDirectory() as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            finished = [
                run for run in read_runs(sorted(Path(folder).iterdir())) if run.summary is not None
            ]
        found += [(archive.name.removesuffix(".tar.xz"), group) for group in group_runs(finished)]
    return found


def difference(group: Group) -> str:
    plain = group.baseline
    if plain is None or plain is group:
        return ""
    if not (values := pair(group.by_seed("bits_per_byte"), plain.by_seed("bits_per_byte"))):
        return ""  # no seed of both has ended
    paired = Paired(values, group.comparisons)
    return f"{paired.stat.text(sign='+')}, {paired.verdict}"


def picture(name: str) -> str:
    found = json.loads(MATRICES.read_text())
    matrix, sublayers = found["matrices"][name], found["sublayers"]
    text = (
        f"A small decoder after {found['steps']} steps. Rows are reads, the output head last. Columns are sources, the "
        "embedding first. The stronger the colour, the more a read takes of a source; orange is negative."
    )
    return f"{svg(matrix, sublayers)}\n\n{text} {note(name)}"


def note(name: str) -> str:
    from headwater.analyze.mixing import NOTES
    from headwater.residuals import build

    return f"The matrix is {NOTES[build(name, 64, 12).mixes]}."


def svg(matrix: list[list[float]], sublayers: list[str], cell: int = 22) -> str:
    """A grid, its opacity the weight in shares of the largest; every cell says its number when pointed at."""
    largest = max(abs(value) for row in matrix for value in row)
    labels = [*sublayers, "head"]
    sources = ["embedding", *sublayers]
    cells = [
        f'<rect x="{64 + c * cell}" y="{r * cell}" width="{cell - 1}" height="{cell - 1}" '
        f'class="{"below" if value < 0 else "above"}" fill-opacity="{max(0.04, abs(value) / largest):.3f}">'
        f"<title>read {r} ({labels[r]}) takes {value:.3f} of source {c} ({sources[c]})</title></rect>"
        for r, row in enumerate(matrix)
        for c, value in enumerate(row[: r + 1])
    ]
    texts = [
        f'<text x="58" y="{r * cell + 15}">{label[:9]}</text>' for r, label in enumerate(labels)
    ]
    size = len(matrix) * cell
    return f'<svg class="mixing" viewBox="0 0 {64 + size} {size}" role="img">{"".join(cells + texts)}</svg>'
