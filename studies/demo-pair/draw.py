"""Draw the curves of the pair as figure.svg: `PYTHONPATH=. python studies/demo-pair/draw.py`."""

import json
from pathlib import Path

from headwater.analyze.plot import Panel, lines_of, picture

HERE = Path(__file__).parent


def main() -> None:
    pair = json.loads((HERE / "results" / "pair.json").read_text())
    losses: dict[str, dict[float, list[float]]] = {}
    for residual in ("standard", "attnres-block"):
        points = pair[residual]["curve"]
        losses[residual] = {point["tokens"] / 1e6: [point["bits_per_byte"]] for point in points}
    block, plain = losses["attnres-block"], losses["standard"]
    lead = {"attnres-block": {tokens: [block[tokens][0] - plain[tokens][0]] for tokens in plain}}
    panels = [
        Panel(
            "bits per byte of held-out text",
            "million tokens",
            lines_of(losses),
            label="{:.0f}".format,
        ),
        Panel(
            "Block less the plain residual", "million tokens", lines_of(lead), label="{:.0f}".format
        ),
    ]
    (HERE / "figure.svg").write_text(picture(panels, "Loss of both models of the pair on an H200"))


if __name__ == "__main__":
    main()
