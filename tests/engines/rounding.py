"""The largest distance of two runs' losses, in fp32 and in fp64: what is rounding, and what would be a fault.

    build/engines/bin/python tests/engines/rounding.py >benchmarks/results/DATE/cpu-torchtitan.txt

torchtitan's own trainer, Llama 3 debug model, Block, 20 steps at torchtitan's learning rate.
"""

from launch import losses_of, run_all
from test_torchtitan import BLOCK, RATE, RUNS

ALONE = {"one process": {}, "one process, rows of a batch backwards": {"backwards": True}}
PAIRS = {"FSDP2": {}, "1F1B": {"pipeline": "1F1B"}}


def main() -> None:
    for dtype in ("float32", "float64"):
        base = {"residual": BLOCK, "rate": RATE, "dtype": dtype}
        results = run_all(RUNS, 1, [{**base, **run} for run in ALONE.values()])
        results += run_all(RUNS, 2, [{**base, **run} for run in PAIRS.values()])
        expected = losses_of(results[0])
        for name, ranks in zip([*ALONE, *PAIRS], results, strict=True):
            distances = [abs(a - b) for a, b in zip(losses_of(ranks), expected, strict=True)]
            print(f"{dtype}  {name:40} {max(distances):.1e}", flush=True)


if __name__ == "__main__":
    main()
