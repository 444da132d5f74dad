"""Write the archives in runs/ anew, as headwater names runs now: `python studies/attention-residuals/migrate.py`.

Done once. A run's folder gets the hash of its settings and text behind its name. Settings that were not there when
the run began are written into its config.json with what it did; hashes of texts move from corpora.json, one file for a
recipe, into the launch.json of each run. Metrics, summaries and logs stay as they are.
"""

import json
import sys
import tarfile
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from headwater.models.config import ModelConfig  # noqa: E402
from headwater.residuals.parameter_groups import sort_parameters  # noqa: E402
from headwater.residuals.plugins import import_plugins  # noqa: E402
from headwater.runs.identity import digits_of  # noqa: E402
from headwater.train.recipes import shape_of  # noqa: E402
from headwater.train.studies import identity_of  # noqa: E402

# Every recipe was run on this text (README.md, "What every run shares").
TEXT = {
    "source_hash": "c734bd98eff394e35ec9dc70aa6f7fe4fb01a851284e17b35d0f3d6d732aeb6e",
    "tokenizer_hash": "182d435df45672a4f75b56072d94092f8f05ebda5876108891ad0eabbb721f02",
    "split": "by_document",
}
# What runs did that began before a setting existed.
BEFORE: dict[str, dict[str, Any]] = {
    "model": {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING},
    "data": {"text_field": "text"},
    "optim": {"query_lr": 1.0},
    "train": {"init_from": "", "graph": False},
}


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def migrate(run: Path, corpus: dict[str, Any]) -> None:
    """One run's folder."""
    config = read(run / "config.json")
    for section, settings in BEFORE.items():
        config[section] = {**settings, **config[section]}
    write(run / "config.json", config)
    if corpus:
        write(run / "launch.json", {**read(run / "launch.json"), "corpus": corpus})
    model = shape_of(ModelConfig.from_dict(config["model"]))
    queries = sort_parameters(model)["queries"]
    unfelt = frozenset() if queries else frozenset({"optim.query_lr"})
    digits = identity_of(config, TEXT, unfelt)
    if digits_of(run) != digits:
        run.rename(run.with_name(f"{run.name}-{digits}"))


def main() -> None:
    import_plugins(["rivals", "examples.new_residual"])
    for archive in sorted((HERE / "runs").glob("*.tar.xz")):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
                kept = packed.getmembers()[0]
            root = Path(folder) / archive.name.removesuffix(".tar.xz")
            corpora = read(root / "corpora.json")
            for run in sorted((root / "runs").iterdir()):
                migrate(run, corpora.get(run.name, {}))
            (root / "corpora.json").unlink(missing_ok=True)
            pack(root, archive, kept)
        print(archive.name)


def pack(root: Path, archive: Path, like: tarfile.TarInfo) -> None:
    """Without times and owners, so that equal contents are equal files."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid = like.mtime, 0, 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as packed:
        packed.add(root, root.name, filter=bare)


if __name__ == "__main__":
    main()
