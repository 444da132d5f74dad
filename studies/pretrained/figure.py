"""Draw what look.py measured, and print its table.

    PYTHONPATH=. python studies/pretrained/figure.py

Reads results/depth.json and writes docs/assets/pretrained-depth.svg: the size of the stream and of each output by
depth, and the rise of the loss when an output is taken away.
"""

import json
from statistics import median
from typing import Any

from before import HERE

from headwater.analyze.plot import Line, Panel, picture

FIGURE = HERE.parent.parent / "docs" / "assets" / "pretrained-depth.svg"
KINDS = {"attention": "block", "mlp": "full"}
THIRDS = 3


def main() -> None:
    results = json.loads((HERE / "results" / "depth.json").read_text())
    FIGURE.write_text(draw(results))
    print(table(results))


def layers_of(results: dict[str, Any], kind: str, values: list[float]) -> dict[float, list[float]]:
    """The values of the outputs of one kind by layer, from 1."""
    places = [place for place, name in enumerate(results["kinds"]) if name == kind]
    return {layer: [values[place]] for layer, place in enumerate(places, start=1)}


def draw(results: dict[str, Any]) -> str:
    sizes, losses = results["output_size"], results["loss_without"]
    # Read i sees outputs 0 to i, so the place of an MLP is also that of the stream after it.
    stream = layers_of(results, "mlp", results["stream_size"])
    size_lines = [Line("stream", "plain", stream)]
    loss_lines = []
    for kind, colour in KINDS.items():
        size_lines.append(Line(kind, colour, layers_of(results, kind, sizes)))
        loss_lines.append(Line(kind, colour, layers_of(results, kind, losses)))
    panels = [
        Panel("size, root mean square", "layer", size_lines),
        Panel("loss without the output, less with it", "layer", loss_lines),
    ]
    return picture(panels, "Sizes by depth, and the effect of each output, in SmolLM2-135M")


def table(results: dict[str, Any]) -> str:
    """Medians over thirds of the depth, as Markdown."""
    rows = ["| | first third | middle third | last third |", "|---|---|---|---|"]
    stream, sizes = results["stream_size"], results["output_size"]
    # Read i sees the embedding and the outputs before it; output i + 1 is what it leads to.
    outputs = sizes[1:]
    values = {
        "size of the stream that a sublayer reads": stream[:-1],
        "size of the output that it adds": outputs,
        "output in sizes of that stream": [a / b for a, b in zip(outputs, stream)],
        "output in sizes of the last stream": [size / stream[-1] for size in outputs],
        "rise of the loss without the output": results["loss_without"][1:],
    }
    length = len(outputs) // THIRDS
    for name, numbers in values.items():
        thirds = [numbers[third * length : (third + 1) * length] for third in range(THIRDS)]
        rows.append(f"| {name} | {' | '.join(f'{median(third):.2g}' for third in thirds)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
