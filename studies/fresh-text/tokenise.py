"""Learn a vocabulary from a sample, and write the tokens of a collected text as `headwater train` reads them.

    PYTHONPATH=. python studies/fresh-text/tokenise.py COLLECTED OUT --prose BOOKS ABSTRACTS

COLLECTED is what collect.py wrote; books and abstracts are files of documents between lines `<|endoftext|>`. Packages
and books are held out whole.
"""

import argparse
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from headwater.runs.settings import DataSettings
from headwater.train.data.corpus import documents, find_files
from headwater.train.data.dataset import prepare
from headwater.train.data.tokenizer import BPETokenizer

VOCABULARY = 8192
EVERY = 10  # a tenth of books and abstracts is in the sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("collected", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prose", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=float, default=0.01, help="share of the bytes")
    options = parser.parse_args()
    prose = tuple(map(str, options.prose))
    tokenizer = BPETokenizer.train(sample(options.collected / "sample.txt", prose), VOCABULARY)
    tokenizer.save(options.collected)
    settings = DataSettings(
        source=(str(options.collected / "packages"), *prose),
        tokenizer=str(options.collected / "tokenizer.json"),
        validation=options.held_out,
        cache=str(options.out.parent / "cache"),
    )
    data = prepare(settings)
    shutil.copytree(data.folder, options.out)
    for split in ("train", "validation"):
        counts = data.manifest[split]
        print(f"{split}: {counts['tokens']:,} tokens of {counts['bytes']:,} bytes")


def sample(code: Path, prose: tuple[str, ...]) -> Iterator[str]:
    for document in documents(find_files((str(code),))):
        yield document.text
    for document in islice(documents(find_files(prose)), 0, None, EVERY):
        yield document.text


if __name__ == "__main__":
    main()
