"""A page for each registered residual: formula, start, cost, options, mixing matrix, differences, plain code."""

import inspect
import json
import re
from pathlib import Path

from command_page import wrapped
from mathematics import symbols, typeset

from benchmarks.tables import step_costs
from headwater.analyze.table import Row, residual_table
from headwater.residuals import entry, options_of
from tests.formulas import FORMULAS

ROOT = Path(__file__).parents[2]
DIFFERENCES = ROOT / "docs" / "explanation" / "implementations.md"
MATRICES = ROOT / "studies" / "mixing-matrices" / "results.json"
STUDY = ROOT / "docs" / "results" / "study-tables.md"
SIZES = {
    "128": "2 million",
    "192": "7 million",
    "256": "16 million",
    "384": "43 million",
}  # by width
# Two plain sentences for each residual: what it does, and when to take it.
PURPOSE = {
    "standard": "Adds every output to one stream with weight one. Take it as the baseline of every comparison.",
    "attnres-block": "Lets each sublayer weigh the embedding and sums of about eight blocks of outputs. "
    "Take it first: it starts as the plain residual, and costs little memory and time.",
    "attnres-full": "Lets each sublayer weigh every earlier output. "
    "Take it where loss per token matters more than speed and memory.",
    "attnres-routed": "Gives query, key and value of an attention reads of their own, over normed sources. "
    "Take it for the residual of Inkling-2; it has no kernels.",
    "ddl": "Erases the stream along a learned direction, and writes there. "
    "Take it to study networks that forget; it needs training from scratch.",
    "deepcrossattention": "Gives query, key and value of an attention inputs of their own, each a weighted sum of "
    "earlier layers. Take it where attention should look at different depths; it is slow without kernels.",
    "deepnorm": "Norms the stream after each addition, and scales the stream up before it. "
    "Take it to compare with post-norm networks; it needs a learning rate of its own.",
    "delta-attnres": "Adds an attention over depth to the plain stream. "
    "Take it to keep the plain stream and let sublayers look back beside it.",
    "denseformer": "Replaces the stream after each layer by a learned average of all earlier layers. "
    "Take it for a change that costs a few numbers per layer.",
    "depth-window": "Lets each sublayer attend over the last few states of its own token. "
    "Take it to compare attention along depth with attention along the sequence.",
    "elc-bert": "Gives each layer a softmax-weighted sum of all earlier layers, without a skip of its own. "
    "Take it to reproduce ELC-BERT.",
    "highway": "Mixes the stream and each output by a learned gate. Take it as the classic gated residual.",
    "hyper-attnres": "Runs several streams and an attention over depth side by side, and adds what both read. "
    "Take it to ask whether the two gains add up.",
    "hyper-connections": "Keeps several streams, which every sublayer mixes with learned weights. "
    "Take it as the base of mHC.",
    "laurel": "Adds a learned low-rank map of the stream, or earlier states, to the plain residual. "
    "Take it for a small change of the skip itself.",
    "layerscale": "Multiplies each output by a learned gain per channel, which starts small. "
    "Take it for very deep networks that train unsteadily.",
    "identity-hc": "Keeps several streams that never mix: only reads and writes are learned. "
    "Take it for the residual of Hy-V4, or in place of mHC where its mixing seems to do nothing.",
    "gated-hc": "Keeps several streams, of which a sublayer reads the gated mean, with a gate for each channel. "
    "Take it for the residual of Qwen4Exp; it has many parameters.",
    "mhc": "Keeps several streams, mixed by matrices that neither grow nor shrink a signal. "
    "Take it where several streams should stay stable in deep models.",
    "mhc-lite": "Mixes several streams by weighted permutations, which are doubly stochastic exactly. "
    "Take it in place of mHC to avoid Sinkhorn's iterations.",
    "muddformer": "Gives query, key, value and stream of a layer sums of all earlier layers, weighted by the token. "
    "Take it with `norm=true` where memory is no concern.",
    "rezero": "Multiplies each output by one learned number that starts at zero. "
    "Take it for networks that should begin as the identity.",
    "vertical-attention": "Feeds each layer a softmax-weighted sum of normed earlier layers beside its own skip. "
    "Take it as a stand-in for an unpublished method.",
}  # fmt: skip
SYMBOL = re.compile(r"\b([A-Za-z](?:\^\w)?_(?:\{[^}]+\}|\w))")  # such as X_m or n_{ij}
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
        "[How to choose](../../start/choose.md) helps to pick one. [How to add one](../../guides/new-residual.md).",
        "[Six released models](../released.md) have one of them.\n",
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
        f'<div class="beside" markdown>\n\n{PURPOSE[name]}\n\n{picture(name)}\n\n</div>',
        typeset(known.formula),
        f"## Use it\n\n{usage(name)}",
        f"## In words\n\n{described(name)}",
        f"## Options\n\n{options(name)}",
        f"## At the start\n\n{STARTS[row.at_start]}",
        f"## Cost\n\n{costs(name, row)}",
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
        f"| `{option.name}` | {option.takes} | `{option.default}` | {sentence(option.meaning)} |"
        for option in found
    ]
    first = f"`{name}:{found[0].name}=...`"
    head = "| option | takes | default | what it does |\n|---|---|---|---|\n"
    return f"Options follow the name: {first}.\n\n" + wrapped(head + "\n".join(lines))


def sentence(meaning: str) -> str:
    """Write an option's meaning as a sentence, with its symbols typeset."""
    parts = re.split(r"(`[^`]*`)", meaning.replace("<", "&lt;"))
    parts[::2] = [SYMBOL.sub(r"$\1$", part) for part in parts[::2]]
    text = "".join(parts)
    return f"{text[0].upper()}{text[1:]}."


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
        "The others are measured steps of a small model (width 512, nothing compiled, older code on the "
        "H200), relative to `standard`. They compare residuals: "
        "[larger or compiled models](../../start/choose.md#what-a-step-costs) pay far less"
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
    """Quote the rows of the study's tables: of the scaling, else of the ablations; nothing without any."""
    rows = study_rows("scaling", name) or study_rows("ablations", name)[:3]
    if not rows:
        return ""
    interval = "95 % interval, not corrected"
    head = ["size", "variant", "seeds", "bits per byte", "difference", interval, ""]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return (
        "## In the study\n\n"
        + "\n".join(lines)
        + "\n\nDifferences are to the plain residual, seed by seed; below zero is better. "
        "[The study](../../results/study.md) has the answers, "
        "[its tables](../../results/study-tables.md) all rows."
    )


def study_rows(table: str, name: str) -> list[list[str]]:
    """Find a residual's rows in a table of the study, the smallest size first; the first column becomes the size."""
    found = re.search(
        rf"<!-- {table}:begin -->(.*?)<!-- {table}:end -->", STUDY.read_text(), re.DOTALL
    )
    assert found, f"{STUDY.name} has no table {table}"
    rows, size = list[list[str]](), SIZES["128"]  # the ablations are all of this size
    for line in found[1].splitlines():
        if width := re.match(r"Width (\d+),", line):
            size = SIZES[width[1]]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.split("[:+]", cells[0].strip("`"))[0] == name:
            seeds, bits, difference, interval, verdict = (cells[i] for i in (1, 2, 4, -2, -1))
            rows.append([size, cells[0], seeds, bits, difference, interval, verdict])
    return rows


def picture(name: str) -> str:
    found = json.loads(MATRICES.read_text())
    matrix, sublayers = found["matrices"][name], found["sublayers"]
    text = (
        f"*Who reads whom in a small decoder after {found['steps']} steps. Rows are reads, the output head "
        "last. Columns are sources, the embedding first. The stronger the colour, the more a read takes of a "
        "source; orange is negative."
    )
    return f"{svg(matrix, sublayers)}\n\n{text} {note(name)}*"


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
        f'class="{"below" if value < 0 else "above"}" fill-opacity="{max(0.06, abs(value) / largest):.3f}">'
        f"<title>read {r} ({labels[r]}) takes {value:.3f} of source {c} ({sources[c]})</title></rect>"
        for r, row in enumerate(matrix)
        for c, value in enumerate(row[: r + 1])
    ]
    texts = [
        f'<text x="58" y="{r * cell + 15}">{label[:9]}</text>' for r, label in enumerate(labels)
    ]
    size = len(matrix) * cell
    return f'<svg class="mixing" viewBox="0 0 {64 + size} {size}" role="img">{"".join(cells + texts)}</svg>'
