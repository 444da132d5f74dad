"""Collects the pair's text: the standard library of this Python, and packages that were downloaded as wheels.

    python -m pip download --no-deps --only-binary :all: --dest WHEELS PACKAGE...
    python studies/demo-pair/text.py WHEELS OUT

OUT then holds text.jsonl with a document for each module, sample.jsonl with every tenth of them, from which the
vocabulary is learned, and packages.json with the version, licence and bytes of each package.
"""

import argparse
import hashlib
import json
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|ZPL|Zope)\b", re.I)
OTHER = re.compile(r"GPL|General Public|MPL|Mozilla|EPL|Eclipse|CC-BY", re.I)
# Tests repeat themselves, and copies of other packages are text twice.
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|idle_test|_vendor|vendor|site-packages|encodings|locale)(/|$)"
)
LARGEST = 200_000
WIDEST = 60
SHARE = 6_000_000  # of one package, so that none is most of the text


def licence_of(metadata: str) -> str:
    """Return a package's licence: the expression, else the classifiers, else the first line of the field."""
    fields = Parser().parsestr(metadata, headersonly=True)
    if expression := fields.get("License-Expression"):
        return expression
    classifiers = fields.get_all("Classifier", [])
    licences = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License")]
    if licences := [name for name in licences if name != "OSI Approved"]:
        return ", ".join(licences)
    return fields.get("License", "").strip().partition("\n")[0]


def is_code(name: str, text: str) -> bool:
    """Tell modules that people wrote from tables of data, whose lines are long."""
    lines = text.count("\n") + 1
    digits = sum(map(str.isdigit, text))
    return (
        len(text) <= LARGEST
        and len(text) / lines <= WIDEST
        and digits <= len(text) / 10
        and not SKIPPED.search(name)
    )


def order(name: object) -> str:
    """Mix the modules of a package: of a large one the first are taken, and these shall be of all parts."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def stdlib() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=order):
        yield path.relative_to(root).as_posix(), path.read_text(errors="replace")


def modules(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for name in sorted(wheel.namelist(), key=order):
        if name.endswith(".py"):
            yield name, wheel.read(name).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    documents: list[str] = []

    def collect(package: str, files: Iterator[tuple[str, str]]) -> int:
        size = 0
        for name, text in files:
            if size > SHARE:
                break
            if text.strip() and text not in seen and is_code(name, text):
                seen.add(text)
                documents.append(json.dumps({"name": f"{package}/{name}", "text": text}))
                size += len(text)
        return size

    version = sys.version.split()[0]
    packages = [
        {
            "name": "python",
            "version": version,
            "licence": "PSF-2.0",
            "bytes": collect("python", stdlib()),
        }
    ]
    for path in sorted(options.wheels.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        with zipfile.ZipFile(path) as wheel:
            metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            licence = licence_of(wheel.read(metadata).decode())
            if not PERMISSIVE.search(licence) or OTHER.search(licence):
                print(f"left out: {name} {version}, {licence!r}")
                continue
            size = collect(name, modules(wheel))
        packages.append({"name": name, "version": version, "licence": licence, "bytes": size})
    (options.out / "text.jsonl").write_text("\n".join(documents) + "\n")
    (options.out / "sample.jsonl").write_text("\n".join(documents[::10]) + "\n")
    lines = ",\n".join("  " + json.dumps(package) for package in packages)
    (options.out / "packages.json").write_text(f"[\n{lines}\n]\n")
    total = sum(package["bytes"] for package in packages)
    print(f"{len(documents)} modules of {len(packages)} packages, {total / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
