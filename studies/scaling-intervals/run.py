"""How often do the intervals of a scaling fit hold? Curves that are known, with noise that is known, many times over.

    PYTHONPATH=. python studies/scaling-intervals/run.py                        # ten minutes on one core

Each case has arms with seeds at four budgets, and the noise of each budget. Of each arm but the baseline it prints how
often the true multiplier at each budget lies inside its interval, and how wide that is in the middle of all draws.
"""

import argparse
import math

import numpy as np

from headwater.analyze.power_law import Fit
from headwater.analyze.scaling import compare_scaling

BUDGETS = (1.5e15, 1e16, 4.5e16, 1.4e17)
PLAIN, BETTER = Fit(1.047, 0.331, 0.265, 5.1e15), Fit(1.06, 0.285, 0.29, 5.1e15)
LARGER = 0.0145, 0.0022, 0.0022, 0.0022
EVEN = (0.004,) * 4
SEEDS = 6, 3, 2, 1
# As the arms of the study's scaling; how far runs vary of which there is one from the second budget on is a guess.
STUDY = {
    "standard": ((6, 3, 3, 1), (0.0123, 0.0014, 0.0014, 0.0014)),
    "attnres-block": (SEEDS, (0.0136, 0.0033, 0.0033, 0.0033)),
    "attnres-full": (SEEDS, (0.0171, 0.0033, 0.0033, 0.0033)),
    "mhc": ((4, 2, 2, 1), (0.0068, 0.0058, 0.0058, 0.0058)),
    "muddformer:norm=true": ((1, 3, 1, 1), (0.0145, 0.008, 0.008, 0.008)),
    "embedding-skip": ((4, 1, 1, 1), (0.0052, 0.0033, 0.0033, 0.0033)),
    "completep": ((4, 1, 1, 1), (0.0107, 0.0033, 0.0033, 0.0033)),
}
# Arms with their seeds and noise, the baseline first, and how far runs of equal seed vary together.
CASES = (
    ({"standard": ((6, 3, 1, 1), LARGER), "better": (SEEDS, LARGER)}, 0.0),
    ({"standard": (SEEDS, LARGER), "better": ((4, 1, 1, 1), LARGER)}, 0.0),
    ({"standard": (SEEDS, EVEN), "better": (SEEDS, EVEN)}, 0.0),
    ({"standard": (SEEDS, EVEN), "better": (SEEDS, EVEN)}, 0.8),
    ({"standard": ((3,) * 4, EVEN), "better": ((3,) * 4, EVEN)}, 0.0),
    *(({name: STUDY[name] for name in ("standard", arm)}, 0.0) for arm in [*STUDY][1:5]),
    (STUDY, 0.0),
)  # fmt: skip


def drawn(arms, share, random):
    """Losses by residual, budget and seed."""
    shared = {(c, s): random.standard_normal() for c in BUDGETS for s in range(8)}
    points = {}
    for name, (seeds, noise) in arms.items():
        curve, alike = (PLAIN, 1.0) if name == "standard" else (BETTER, share)
        apart = math.sqrt(1 - alike**2)
        points[name] = {
            c: {
                s: curve.loss(c) + sigma * (alike * shared[c, s] + apart * random.standard_normal())
                for s in range(n)
            }
            for c, n, sigma in zip(BUDGETS, seeds, noise, strict=True)
        }
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--draws", type=int, default=300)
    flags = parser.parse_args()
    true = [PLAIN.compute(BETTER.loss(c)) / c for c in BUDGETS]
    for arms, share in CASES:
        random, others = np.random.default_rng(0), [name for name in arms if name != "standard"]
        held, widths = (
            {name: np.zeros(len(BUDGETS)) for name in others},
            {name: [] for name in others},
        )
        for seed in range(flags.times):
            for found in compare_scaling(
                drawn(arms, share, random), "standard", draws=flags.draws, seed=seed
            )[1:]:
                met = [found.multipliers[c] for c in BUDGETS]
                spans = [(each.low, each.high) if each else (-math.inf, math.inf) for each in met]
                held[found.residual] += [
                    low <= value <= high for value, (low, high) in zip(true, spans, strict=True)
                ]
                widths[found.residual].append([high - low for low, high in spans])
        print(f"{len(arms)} arms, the baseline {arms['standard']}, shared {share}:", flush=True)
        for name in others:
            cells = zip(held[name] / flags.times, np.median(widths[name], 0), strict=True)
            print(
                f"  {name} {arms[name]}: {' '.join(f'{part:.2f} ({width:.2f})' for part, width in cells)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
