"""Does training still end in the same weights? Every residual, with a commit and with the working tree, bit by bit.

python studies/same-weights/run.py COMMIT                # train with both, and compare
python studies/same-weights/run.py COMMIT --save FILE    # train with the commit alone, and keep its hashes
python studies/same-weights/run.py --against FILE        # train with the working tree, and compare with those
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from safetensors import deserialize

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--source corpus --dim 16 --layers 3 --heads 4 --kv-heads 2 --mlp-dim 32 --context 32 --validation 0.1 "
    "--batch-size 4 --steps 20 --warmup 4 --log-every 1 --eval-every 10 --eval-windows 8 --depth-every 10 --device cpu"
)
OPTIONS = (  # besides every name by itself; flags may follow
    "attnres-block:block=3",
    "attnres-block:query=projected",
    "attnres-full:heads=4",
    "attnres-full:weights=sigmoid",
    "ddl:width=4,compress=channel",
    "depth-window:window=2",
    "mhc:streams=2",
    "attnres-block:block=2 --optimizer muon",
)
SHOWN = 5  # names of what differs


def headwater(tree: Path, scratch: Path, *words: str) -> subprocess.CompletedProcess:
    """The command line of the package in `tree`; whatever it writes is in `scratch`."""
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "HEADWATER_CACHE": str(scratch / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "headwater.cli", *words]
    return subprocess.run(
        command, cwd=scratch, env=env, capture_output=True, text=True, check=False
    )


def list_cases(tree: Path, scratch: Path) -> list[str]:
    table = headwater(tree, scratch, "residuals", "--markdown")
    table.check_returncode()
    return [*re.findall(r"^\| `([^`]+)`", table.stdout, re.MULTILINE), *OPTIONS]


def train(tree: Path, scratch: Path, case: str) -> dict[str, str | float]:
    """The hash of every tensor in the newest checkpoint, and every loss."""
    out = scratch / re.sub(r"\W", "-", case)
    done = headwater(
        tree, scratch, "train", *TINY.split(), "--out", str(out), "--residual", *case.split()
    )
    if done.returncode:
        return {
            "failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        }
    found: dict[str, str | float] = {}
    for file in sorted(max(out.glob("checkpoints/step-*")).glob("*.safetensors")):
        for name, tensor in deserialize(file.read_bytes()):
            about = f"{tensor['dtype']} {tensor['shape']} ".encode()
            found[f"{file.stem}/{name}"] = hashlib.sha256(about + bytes(tensor["data"])).hexdigest()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return found | {
        f"{r['kind']} loss of step {r['step']}": r["loss"] for r in records if "loss" in r
    }


def train_all(
    tree: Path, scratch: Path, cases: list[str], jobs: int
) -> Iterator[dict[str, str | float]]:
    (scratch / "corpus").mkdir(parents=True)
    for i in range(40):
        (scratch / "corpus" / f"{i}.txt").write_text(
            f"river {i} runs from its headwater to the sea. " * 6
        )
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(train, tree, scratch), cases)


def compare(before: dict[str, str | float], now: dict[str, str | float]) -> str:
    for which, run in (("before", before), ("now", now)):
        if "failed" in run:
            return f"failed {which}: {run['failed']}"
    names = {**before, **now}
    differing = sorted(name for name in names if before.get(name, "none") != now.get(name, "none"))
    if not differing:
        return "equal"
    more = ", ..." if len(differing) > SHOWN else ""
    return f"{len(differing)} of {len(names)} differ: {', '.join(differing[:SHOWN])}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="a residual's name, for all its cases, or one case",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    flags = parser.parse_args()
    if (flags.commit is None) == (flags.against is None) or (flags.save and flags.against):
        parser.error("give a COMMIT, or --against FILE")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if flags.against:
            before = json.loads(flags.against.read_text())
        else:
            archive = [
                "git",
                "archive",
                "--output",
                str(folder / "tree.tar"),
                flags.commit,
                "headwater",
            ]
            subprocess.run(archive, cwd=ROOT, check=True)
            subprocess.run(["tar", "-xf", "tree.tar"], cwd=folder, check=True)
            before = dict.fromkeys(list_cases(folder, folder))
        cases = [
            case
            for case in before
            if not flags.only or {case, re.split("[: ]", case)[0]} & set(flags.only)
        ]
        if not cases:
            parser.error(f"no case of that name: {', '.join(before)}")
        if flags.commit:
            before = dict(zip(cases, train_all(folder, folder / "before", cases, flags.jobs)))
        if flags.save:
            flags.save.write_text(json.dumps(before, indent=1) + "\n")
            return int(any("failed" in run for run in before.values()))
        verdicts = []
        for case, now in zip(cases, train_all(ROOT, folder / "now", cases, flags.jobs)):
            verdicts.append(compare(before[case], now))
            print(f"{case:<40} {verdicts[-1]}", flush=True)
    return int(any(verdict != "equal" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
