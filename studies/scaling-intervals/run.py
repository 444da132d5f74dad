"""How often do the intervals of a scaling fit hold? Curves that are known, with noise that is known, many times over.

    PYTHONPATH=. python studies/scaling-intervals/run.py                        # six minutes on one core

Each case has seeds at four budgets, of a residual and of the baseline, and the noise of each budget. The table has how
often the true multiplier at each budget lies inside its interval, and how wide that is in the middle of all cases.
"""

import argparse
import math

import numpy as np

from headwater.analyze.scaling import Fit, compare_scaling

BUDGETS = (1.5e15, 1e16, 4.5e16, 1.4e17)
PLAIN, BETTER = Fit(1.047, 0.331, 0.265, 5.1e15), Fit(1.06, 0.285, 0.29, 5.1e15)
LARGER = 0.0145, 0.0022, 0.0022, 0.0022
EVEN = (0.004,) * 4
QUIET = 0.0123, 0.0004, 0.0004, 0.0004  # as the study's plain residual
# Seeds of the residual and of the baseline, noise of each, and how far runs of equal seed vary together.
CASES = (
    ((6, 3, 2, 1), (6, 3, 1, 1), LARGER, LARGER, 0.0),
    ((4, 1, 1, 1), (6, 3, 2, 1), LARGER, LARGER, 0.0),
    ((6, 3, 2, 1), (6, 3, 2, 1), EVEN, EVEN, 0.0),
    ((6, 3, 2, 1), (6, 3, 2, 1), EVEN, EVEN, 0.8),
    ((3, 3, 3, 3), (3, 3, 3, 3), EVEN, EVEN, 0.0),
    ((6, 3, 2, 1), (6, 3, 2, 1), (0.0145, 0.0033, 0.0033, 0.0033), QUIET, 0.0),  # as Block and Full
    ((1, 3, 1, 1), (6, 3, 2, 1), (0.0145, 0.008, 0.008, 0.008), QUIET, 0.0),  # as MUDDFormer with norms
    ((4, 1, 2, 1), (6, 3, 2, 1), (0.0068, 0.008, 0.008, 0.008), QUIET, 0.0),  # as mHC
)


def drawn(seeds, plain_seeds, noise, plain_noise, share, random):
    """Losses by residual, budget and seed."""
    shared = {(c, s): random.standard_normal() for c in BUDGETS for s in range(8)}
    points = {"standard": {}, "better": {}}
    cases = zip(BUDGETS, seeds, plain_seeds, noise, plain_noise, strict=True)
    for c, count, plain_count, sigma, plain_sigma in cases:
        own = {s: share * shared[c, s] + math.sqrt(1 - share**2) * random.standard_normal() for s in range(count)}
        points["standard"][c] = {s: PLAIN.loss(c) + plain_sigma * shared[c, s] for s in range(plain_count)}
        points["better"][c] = {s: BETTER.loss(c) + sigma * own[s] for s in own}
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--draws", type=int, default=300)
    flags = parser.parse_args()
    true = [PLAIN.compute(BETTER.loss(c)) / c for c in BUDGETS]
    for case in CASES:
        random, held, widths = np.random.default_rng(0), np.zeros(len(BUDGETS)), []
        for seed in range(flags.times):
            found = compare_scaling(drawn(*case, random), "standard", draws=flags.draws, seed=seed)[1].multipliers
            spans = [(found[c].low, found[c].high) if found[c] else (-math.inf, math.inf) for c in BUDGETS]
            held += [low <= value <= high for value, (low, high) in zip(true, spans, strict=True)]
            widths.append([high - low for low, high in spans])
        shown = " ".join(f"{share:.2f} ({width:.2f})" for share, width in zip(held / flags.times, np.median(widths, 0)))
        words = "seeds {} and {}, noise {} and {}, shared {}".format(*case)
        print(f"{words}: {shown}", flush=True)


if __name__ == "__main__":
    main()
