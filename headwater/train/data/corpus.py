"""The text of a corpus: files in a fixed order, and the documents inside them.

There are three kinds of file. A text is one document, or several separated by lines that read `<|endoftext|>`. A .jsonl
file has one document a line, under "text" or the field that is named. A .json file has the same, or is an array of
documents. Each may be compressed (.gz, .xz, .bz2, .zst). The default corpus needs no download: sources and
documentation of Python's standard library.
"""

from __future__ import annotations

import io
import json
import lzma
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from headwater.errors import UserError, spell
from headwater.folders import at_home
from headwater.train.data.tokenizer import END_OF_TEXT
from headwater.train.files import from_here, require

STDLIB = "stdlib"
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")  # that are read from a folder
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
CHUNK = 1 << 13  # compressed bytes at a time, since few of them may stand for much text
# Tests are as large as the rest together and repeat themselves; `encodings` is tables of numbers.
STDLIB_SKIPS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
}


@dataclass(frozen=True)
class TextFile:
    name: str
    """Path relative to its source, with forward slashes: the same on every machine, so that the split is too."""
    path: Path
    strict: bool = True
    """Refuse bytes that are not UTF-8; the standard library is not the user's to mend."""
    field: str = "text"
    """Name of the field that holds the document in .jsonl and .json files."""

    @property
    def suffix(self) -> str:
        return plain_suffix(self.path)


@dataclass(frozen=True)
class Document:
    key: str
    text: str


def find_files(sources: tuple[str, ...], field: str = "text") -> list[TextFile]:
    """List every text file of the sources, each source's files sorted by name."""
    files: list[TextFile] = []
    for source in sources:
        files += _stdlib_files() if source == STDLIB else _user_files(at_home(source), field)
    return files


def left_out(sources: tuple[str, ...]) -> str:
    """Say how many visible files of the folders are not read; empty if all of them are."""
    others = 0
    for source in dict.fromkeys(sources):
        if source != STDLIB:
            others += sum(plain_suffix(path) not in SUFFIXES for path in _visible(at_home(source)))
    if not others:
        return ""
    kinds = f"from a folder only {' '.join(SUFFIXES)} are read, compressed or not"
    return f"{others} files are left out: {kinds}; name the others one by one"


def documents(files: list[TextFile]) -> Iterator[Document]:
    """Read the documents of the files in order; blank ones are dropped."""
    for file in files:
        try:
            with _open(file) as lines:
                texts = _json_texts(file, lines) if _is_json(file) else _split_texts(lines)
                for number, text in enumerate(texts):
                    if text.strip():
                        yield Document(f"{file.name}#{number}", text)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeError) as error:
            raise UserError(f"cannot read {file.path}: {error}") from None


def _stdlib_files() -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        skipped = STDLIB_SKIPS & set(name.parts[:-1])
        if path.suffix in (".py", ".txt", ".rst") and not skipped:
            files.append(TextFile(name.as_posix(), path, strict=False))
    return files


def _user_files(source: Path, field: str) -> list[TextFile]:
    if source.is_file():
        return [TextFile(source.name, source, field=field)]
    # The order of names is the same on every machine.
    files = []
    for path in _visible(source):
        if plain_suffix(path) in SUFFIXES:
            files.append(TextFile(path.relative_to(source).as_posix(), path, field=field))
    if not files:
        raise UserError(
            f"no corpus at {from_here(source)}: {spell('data.source')} takes files of text, folders with files that "
            f"end in {', '.join(SUFFIXES)}, or {STDLIB!r}"
        )
    return files


def _visible(folder: Path) -> Iterator[Path]:
    """The files of a folder and of the folders inside of it, sorted by path; none of a file.

    Hidden files belong to a program, such as an editor's copies of texts.
    """
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


def plain_suffix(path: Path) -> str:
    """The suffix in small letters; for a compressed file, that of the file inside."""
    compressed = path.suffix.lower() in COMPRESSED
    return Path(path.stem if compressed else path).suffix.lower()


def _is_json(file: TextFile) -> bool:
    return file.suffix in (".jsonl", ".json")


def _open(file: TextFile) -> IO[str]:
    # Its import is not free, and describing a run needs no text.
    import fsspec

    raw: Any
    if file.path.suffix.lower() == ".zst":
        raw = io.BufferedReader(_ZstdFile(file.path))
    else:
        raw = fsspec.open(str(file.path), compression="infer").open()
    # A mark that the encoding is UTF-8 may open a JSON file without being part of it; in a text file it is text.
    # newline="" keeps \r\n as written: a corpus is bytes, and bits per byte must count them all.
    return io.TextIOWrapper(
        raw,
        encoding="utf-8-sig" if _is_json(file) else "utf-8",
        errors="strict" if file.strict else "replace",
        newline="",
    )


class _ZstdFile(io.RawIOBase):
    """A .zst file, decompressed. The library's own reader takes a file that was cut off for a whole one."""

    def __init__(self, path: Path) -> None:
        self.library = require("zstandard", "zst")
        self.frame = self.library.ZstdDecompressor().decompressobj()
        self.text = io.BytesIO()
        self.file = path.open("rb")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not (count := self.text.readinto(buffer)):
            # What follows a frame in the last chunk is the beginning of the next one.
            data = self.frame.unused_data or self.file.read(CHUNK)
            if not data and self.frame.eof:
                return 0
            if not data:
                raise EOFError("it ends inside of a compressed frame")
            if self.frame.eof:
                self.frame = self.library.ZstdDecompressor().decompressobj()
            try:
                self.text = io.BytesIO(self.frame.decompress(data))
            except self.library.ZstdError as error:
                raise OSError(str(error)) from None
        return count


def _split_texts(lines: IO[str]) -> Iterator[str]:
    text = io.StringIO(newline="")  # a list of lines would take several times the text
    for line in lines:
        if line.strip() == END_OF_TEXT:
            yield text.getvalue()
            text = io.StringIO(newline="")
        else:
            text.write(line)
    yield text.getvalue()


def _json_texts(file: TextFile, lines: IO[str]) -> Iterator[str]:
    for place, value in _json_values(file, lines):
        text = value.get(file.field) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UserError(f"{file.path}, {place}: {_not_a_document(value, file.field)}")
        text.encode()  # JSON can spell half of a character, which nothing could write again
        yield text


def _json_values(file: TextFile, lines: IO[str]) -> Iterator[tuple[str, Any]]:
    """The value of each line, with its place; or the items of an array, which is read whole."""
    # One line at a time, so that a large file needs no memory.
    for number, line in enumerate(lines, start=1):
        place = f"line {number}"
        if file.suffix == ".json" and line.lstrip().startswith("["):
            array = "".join(chain([line], lines))
            for item, value in enumerate(_parse(file, place, array), start=1):
                yield f"item {item}", value
        elif line.strip():
            yield place, _parse(file, place, line)


def _parse(file: TextFile, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file.path}, {place}: this is not JSON ({error}): write one object a line, or in a .json file "
            "one array"
        ) from None


def _not_a_document(value: Any, field: str) -> str:
    """Say why a value has no text, and which of its fields has text."""
    if not isinstance(value, dict):
        return "expected a JSON object on a line of its own, or in the array of a .json file"
    # The longest text is most likely the document.
    texts = [key for key in value if isinstance(value[key], str)]
    choice = "none of them is a string"
    if texts:
        longest = max(texts, key=lambda key: len(value[key]))
        choice = f"choose one with {spell('data.text_field')} {longest}"
    fields = ", ".join(map(repr, value)) or "no field"
    return f"expected a string under {field!r}; found {fields}: {choice}"
