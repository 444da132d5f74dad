"""The measured tables of the documentation, from the current results: `python -m benchmarks.tables` writes them between
their marks in docs/ and README.md, and draws the figures."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.plot import bars, panel_of, svg
from headwater.analyze.plot import picture
from headwater.models.config import SIZES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- ([a-z]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)
# Ours beside the plain residual and some; the peers whose start is slow
STACK = ("h200-attnres", "h200-attnres-peers")
ASSETS = ROOT / "docs" / "assets"
SHAPES = {name: dict(shape) for name, shape in SIZES.items()}
Cells = list[str]

ARMS = {
    "plain-compiled": "plain residual, compiled",
    "headwater": "**headwater**",
    "headwater-compiled": "**headwater**, under `torch.compile`",
    "fla-0": "fla-core 0.6.0, level 0",
    "fla-1": "fla-core 0.6.0, level 1",
    "fla-gluon": "fla-core 0.6.0, Gluon",
    "liger": "Liger 0.8.5",
    "fast-attnres": "fast-attnres 2.1.0",
    "flash-attn-res": "flash-attn-res 0.1.12",
}
TRAINED = {
    "standard": "plain residual",
    "attnres-block": "**Block Attention Residuals**",
    "attnres-full": "**Full Attention Residuals**",
    "attnres-block:schedule=one-pass": "Block, read one by one",
    "attnres-full:schedule=one-pass": "Full, read one by one",
    "fla-attnres": "Block, each read by fla's operator",
    "denseformer": "DenseFormer",
    "muddformer": "MUDDFormer",
    "ddl/model": "Deep Delta Learning",
    "mhc": "mHC, 4 streams",
    "hyper-connections": "Hyper-Connections, 4 streams",
    "deepcrossattention/model": "DeepCrossAttention",
    "deepcrossattention": "DeepCrossAttention, layers compiled",
    "fla-kda": "fla's KDA model, dense, eager",
}
TRAINERS = {
    "headwater": "headwater",
    "headwater-block": "headwater, Block",
    "loop": "a compiled loop like nanoGPT's",
    "transformers": "Trainer of transformers",
}


def path(name: str) -> Path:
    """The current file of a measurement, such as h200-speed: the newest outside of the archive. There is a folder for
    each day; what has just been measured may still lie beside them."""
    files = [
        RESULTS / f"{name}.json",
        *sorted(RESULTS.glob(f"????-??-??/{name}.json"), reverse=True),
    ]
    return next(file for file in files if file.exists())


def read(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path(name).read_text())
    return results


def grid(head: Cells, rows: list[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def source(*names: str) -> str:
    """Name the file, the machine and the torch that a table comes from."""
    about = []
    for name, results in ((name, read(name)) for name in names):
        machine = f"{results.get('gpu') or results['cpu']}, torch {results['torch'].split('+')[0]}"
        about.append(f"`{path(name).relative_to(RESULTS)}` ({machine})")
    return f"\nFrom {' and '.join(about)} in `benchmarks/results`.\n"


def step_costs() -> dict[str, dict[str, float | None]]:
    """Time and peak memory of an eager step of each residual relative to `standard`, at 12 layers."""
    cpu, gpu = (
        {row["residual"]: row for row in read(name)["summary"]}
        for name in ("cpu-residuals", "h200-residuals")
    )
    places = (
        ("time of a step, two CPU cores", cpu, "eager_time"),
        ("memory, two CPU cores", cpu, "eager_memory"),
    )
    places += (
        ("time of a step, one H200", gpu, "eager_time"),
        ("memory, one H200", gpu, "eager_memory"),
    )
    return {
        name: {what: side.get(name, {}).get(key) for what, side, key in places}
        for name in (*cpu, *gpu)
    }


def costs() -> str:
    rows = [
        [f"`{name}`", *("-" if value is None else f"{value:.2f}" for value in costs.values())]
        for name, costs in step_costs().items()
    ]
    head = ["residual", "time, two cores", "memory", "time, H200", "memory"]
    return grid(head, rows) + source("cpu-residuals", "h200-residuals")


def duality() -> str:
    rows = [
        [f"`{row['residual']}`", f"{row['eager_time']:.2f}", f"{row['eager_memory']:.2f}"]
        for row in read("cpu-duality")["summary"]
    ]
    return grid(["variant", "time of a step", "memory"], rows) + source("cpu-duality")


def trained(size: str, *names: str) -> str:
    """Tokens per second of `headwater train`, and its peak of memory; of an arm that is in several files, the first's.
    Each is compared with the plain residual of its own run."""
    runs = {arm: run for name in reversed(names) for arm, run in read(name)[size].items()}
    rows = []
    for arm, label in TRAINED.items():
        if "tokens_per_second" in (run := runs.get(arm, {})):
            memory = "-" if run.get("peak_gib") is None else f"{run['peak_gib']:.1f}"
            rate = run["tokens_per_second"] / 1000
            rows.append(
                [
                    label,
                    f"{rate:.{0 if rate > 10 else 2}f}",
                    f"{100 * run['of_plain']:.0f} %",
                    memory,
                ]
            )
    head = ["", "thousand tokens/s", "of plain", "peak GiB"]
    if all(row[-1] == "-" for row in rows):  # a run that did not take it
        head, rows = head[:-1], [row[:-1] for row in rows]
    return grid(head, rows) + source(*names)


def stack(part: str = "stack", *names: str) -> str:
    """Each arm from the first file that has it; ours and the plain residual from the first."""
    arms: dict[str, dict[str, Any]] = {}
    for name in names or STACK:
        for arm in read(name)[part]["arms"]:
            if "both" in arm:
                arms.setdefault(arm["arm"], arm)
    rows = [
        [ARMS[name], *_times(arm, plain=name == "plain-compiled")] for name, arm in arms.items()
    ]
    rows.sort(key=lambda row: float(row[2]))
    head = ["", "forward, ms", "forward + backward, ms", "extra passes", "peak GiB"]
    return grid(head, rows) + source(*(names or STACK))


def _times(arm: dict[str, Any], plain: bool) -> Cells:
    extra = "" if plain else f"{arm['both']['extra']:.1f}"
    return [
        f"{arm['forward']['ms']:.1f}",
        f"{arm['both']['ms']:.1f}",
        extra,
        f"{arm['peak_gib']:.1f}",
    ]


def full() -> str:
    return stack("full", "h200-attnres")


def decoder() -> str:
    arms = [
        arm
        for name in ("h200-attnres", "h200-attnres-read-decoder")
        for arm in read(name)["decoder"]["arms"]
    ]
    rows = [
        [
            str(arm["dim"]),
            f"{arm['plain_ms']:.0f}",
            f"{arm['ms']:.0f}",
            f"{arm['overhead_percent']:.1f} %",
        ]
        for arm in sorted(arms, key=lambda arm: -arm["dim"])
        if "overhead_percent" in arm
    ]
    head = ["width", "plain, ms", "headwater, ms", "overhead"]
    return grid(head, rows) + source("h200-attnres", "h200-attnres-read-decoder")


def _beside_plain(results: dict[str, Any], first: str) -> str:
    """Rows by what they are called; milliseconds of the plain residual, and of others with what they take more."""
    rows = [
        [
            name.split()[-1],
            f"{arms['plain']['ms']:.2f}",
            *(
                f"{arms[arm]['ms']:.2f} (+{arms[arm]['over_first_percent']:.1f} %)"
                for arm in ("block", "full")
            ),
        ]
        for name, arms in results.items()
        if isinstance(arms, dict)
    ]
    return grid([first, "plain, ms", "Block, ms", "Full, ms"], rows)


def decoding() -> str:
    """Few rows have been measured again since."""
    names = ("h200-generate", "h200-generate-few")
    results = {batch: arms for name in names for batch, arms in read(name)["decode"].items()}
    return _beside_plain(results, "rows") + source(*names)


def cold() -> str:
    results = read("h200-generate-cold")["cold"]
    rows = [
        [arm, *(f"{results[arm][what]:.1f}" for what in ("model", "first_token", "captured"))]
        for arm in results
    ]
    head = [
        "seconds of a new process, nothing compiled",
        "the model",
        "first token",
        "fifth token, step captured",
    ]
    return grid(head, rows) + source("h200-generate-cold")


def prompts() -> str:
    return _beside_plain(read("h200-generate")["prefill"], "tokens") + source("h200-generate")


def deeper() -> str:
    return _beside_plain(read("h200-generate-depth")["depth"], "layers") + source(
        "h200-generate-depth"
    )


def longer() -> str:
    return _beside_plain(read("h200-generate-context")["context"], "tokens") + source(
        "h200-generate-context"
    )


def transformers() -> str:
    results = read("h200-generate-transformers")
    batch = results["decode"]["batch 1"]
    rows = [
        [
            "transformers, static cache, compiled",
            f"{results['hf']['transformers, batch 1']['ms']:.2f}",
        ],
        ["headwater, plain residual", f"{batch['plain']['ms']:.2f}"],
        ["headwater, Block Attention Residuals", f"{batch['block']['ms']:.2f}"],
    ]
    return grid(["one row, one process", "ms a token"], rows) + source("h200-generate-transformers")


def reads() -> str:
    rows = [
        [
            f"{row['sources']} x {row['tokens']} x {row['dim']}",
            f"{1000 * row['forward']['ms']:.0f}",
            _share(row),
        ]
        for row in read("h200-attnres-read-decoder")["read"]["arms"][0]["rows"]
    ]
    return grid(["sources x tokens x width", "µs", "of copy bandwidth"], rows) + source(
        "h200-attnres-read-decoder"
    )


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['of_copy_bandwidth']:.0f} %"


def shapes() -> str:
    """The plain sizes that `--size` names, with their parameters between embedding and head."""
    import torch

    from headwater.models import Decoder, ModelConfig

    columns = ("dim", "layers", "heads", "kv_heads", "mlp_dim", "context")
    rows = []
    for name, shape in SHAPES.items():
        if name.startswith("kimi"):
            continue
        with torch.device("meta"):
            model = Decoder(ModelConfig(vocab_size=64, **shape))
        count = model.parameter_count()["total"] - 2 * 64 * shape["dim"]
        rows.append(
            [f"`{name}`", *(str(shape[column]) for column in columns), f"{count / 1e6:.1f} M"]
        )
    return grid(["size", *columns, "parameters"], rows)


def trainers() -> str:
    """Thousands of tokens per second by size of the model; a trainer that failed has none."""
    results = read("h200-trainers")
    rows = []
    for size in ("50m", "342m"):
        rates = [results[size][name].get("tokens_per_second") for name in TRAINERS]
        cells = ["-" if rate is None else f"{rate / 1000:.0f}" for rate in rates]
        rows.append([size.upper(), *cells])
    return grid(["thousand tokens per second", *TRAINERS.values()], rows)


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "shapes": shapes,
    "duality": duality,
    "speed": partial(
        trained,
        "50m",
        *(f"h200-speed{suffix}" for suffix in ("", "-fla", "-whole", "-deepcrossattention")),
    ),
    "larger": partial(trained, "342m", "h200-speed-342m"),
    "kimi": partial(trained, "kimi", "h200-speed-kimi"),
    "cores": partial(trained, "14m", "cpu-speed"),
    "stack": stack,
    "full": full,
    "decoder": decoder,
    "reads": reads,
    "decoding": decoding,
    "cold": cold,
    "prompts": prompts,
    "deeper": deeper,
    "longer": longer,
    "transformers": transformers,
}

if list(RESULTS.rglob("h200-trainers.json")):  # README's table is empty until it is measured
    TABLES["trainers"] = trainers


def pages() -> list[Path]:
    """The pages that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with every table that it has marks for as the results have it now."""
    return MARKS.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}" if m[2] in TABLES else m[0], text)


def plain_name(arm: str) -> str:
    """Name an arm of the stack, or its CUDA graph, as the table beside the figure does."""
    name, comma, how = arm.partition(", ")
    return re.sub("[*`]", "", ARMS[name]) + comma + how


def figures() -> dict[Path, str]:
    """The figures, by the file that each is drawn to."""
    panels = [
        panel_of("ms a token, by depth", "layers", read("h200-generate-depth")["depth"]),
        panel_of(
            "ms a token, by context",
            "tokens in the cache",
            read("h200-generate-context")["context"],
        ),
    ]
    return {
        ASSETS / "performance.svg": svg(
            [(plain_name(arm), *ms) for arm, *ms in bars([read(name) for name in STACK])]
        ),
        ASSETS / "decoding.svg": picture(panels, "Milliseconds a token by depth and by context"),
    }


if __name__ == "__main__":
    for file, figure in figures().items():
        file.write_text(figure, encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
