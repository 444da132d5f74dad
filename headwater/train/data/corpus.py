"""The text of a corpus: files in a fixed order, and the documents inside them.

There are three kinds of file. A text is one document, or several separated by lines that read `<|endoftext|>`. A .jsonl
file has one document a line, under "text" or the field that is named. A .json file has the same, or is an array of
documents. Each may be compressed (.gz, .xz, .zst). The default corpus needs no download: sources and documentation of
Python's standard library.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headwater.errors import UserError, spell
from headwater.folders import at_home
from headwater.train.data.tokenizer import END_OF_TEXT
from headwater.train.files import from_here

STDLIB = "stdlib"
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")  # that are read from a folder
COMPRESSED = (".gz", ".xz", ".zst")
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
    """Whether bytes that are not UTF-8 are an error; the standard library is not the user's to mend."""
    field: str = "text"
    """Where an object of a .jsonl or .json file has its document."""

    @property
    def suffix(self) -> str:
        return plain_suffix(self.path)


@dataclass(frozen=True)
class Document:
    key: str
    text: str


def find_files(sources: tuple[str, ...], field: str = "text") -> list[TextFile]:
    """List every text file of the sources, each source's files sorted by name."""
    if not sources:
        raise UserError(
            f"no corpus was named: give files or folders with {spell('data.source')}, or {STDLIB!r}"
        )
    files: list[TextFile] = []
    for source in sources:
        files += _stdlib_files() if source == STDLIB else _user_files(at_home(source), field)
    return files


def left_out(sources: tuple[str, ...]) -> list[str]:
    """A line for each folder with visible files that are not read."""
    lines = []
    for source in dict.fromkeys(sources):
        folder = at_home(source)
        if source == STDLIB or not folder.is_dir():
            continue
        files = list(_visible(folder))
        others = sum(plain_suffix(path) not in SUFFIXES for path in files)
        if others:
            lines.append(
                f"{source}: {others} of {len(files)} files are left out: from a folder only {' '.join(SUFFIXES)} are "
                "read, compressed or not; name the others one by one"
            )
    return lines


def documents(files: list[TextFile]) -> Iterator[Document]:
    """Read the documents of the files in order; blank ones are dropped."""
    for file in files:
        lines = _Lines(file)
        texts = _json_texts(file, lines) if _is_json(file) else _split_texts(lines)
        try:
            for number, text in enumerate(texts):
                if text.strip():
                    yield Document(f"{file.name}#{number}", text)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{lines.place} is not UTF-8 text ({error}): convert it or leave it out"
            ) from None
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(f"cannot read {lines.place}: {error}") from None


class _Lines:
    """The lines of a file, which is open while they are read, and how far the reading came."""

    def __init__(self, file: TextFile) -> None:
        self.file = file
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        with _open(self.file) as lines:
            for line in lines:
                self.count += 1
                yield line

    @property
    def place(self) -> str:
        return f"{self.file.path} (after line {self.count})" if self.count else str(self.file.path)


def _stdlib_files() -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.suffix in (".py", ".txt", ".rst") and not STDLIB_SKIPS & set(name.parts[:-1]):
            files.append(TextFile(name.as_posix(), path, strict=False))
    if not files:
        raise UserError(
            f"this Python keeps no standard library sources under {root}: name a corpus with {spell('data.source')}"
        )
    return files


def _user_files(source: Path, field: str) -> list[TextFile]:
    if source.is_file():
        return [TextFile(source.name, source, field=field)]
    if not source.is_dir():
        raise UserError(
            f"no corpus at {from_here(source)}: {spell('data.source')} takes text, .jsonl or .json files, folders, or "
            f"{STDLIB!r}; a run that goes on needs the text that it began with"
        )
    files = []
    for path in _visible(source):
        if plain_suffix(path) in SUFFIXES:
            files.append(TextFile(path.relative_to(source).as_posix(), path, field=field))
    if not files:
        raise UserError(
            f"the corpus folder {source} is empty: it holds no file that ends in {', '.join(SUFFIXES)}; others, such "
            f"as .json, are read if {spell('data.source')} names each of them"
        )
    return files


def _visible(source: Path) -> Iterator[Path]:
    """The files of a folder and of the folders inside of it, sorted by path. Links to folders are not followed.

    Hidden files belong to a program, such as an editor's copies of texts.
    """
    for path in sorted(source.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if not hidden and path.is_file():
            yield path


def plain_suffix(path: Path) -> str:
    """The suffix in small letters; for a compressed file, that of the file inside."""
    return Path(path.stem if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def _is_json(file: TextFile) -> bool:
    return file.suffix in (".jsonl", ".json")


def _open(file: TextFile) -> IO[str]:
    suffix = file.path.suffix.lower()
    raw: Any
    if suffix == ".gz":
        raw = gzip.open(file.path)  # noqa: SIM115 - closed with what wraps it
    elif suffix == ".xz":
        raw = lzma.open(file.path)  # noqa: SIM115
    elif suffix == ".zst":
        raw = io.BufferedReader(_Chunks(_zstd_chunks(file.path)))
    else:
        raw = file.path.open("rb")
    # A mark that the encoding is UTF-8 may open a JSON file without being part of it; in a text file it is text.
    # newline="" keeps \r\n as written: a corpus is bytes, and bits per byte must count them all.
    return io.TextIOWrapper(
        raw,
        encoding="utf-8-sig" if _is_json(file) else "utf-8",
        errors="strict" if file.strict else "replace",
        newline="",
    )


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompress all frames of a .zst file. The library's own reader takes a file that was cut off for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"{path}: to read .zst, Python needs a package: pip install 'headwater[zst]'"
        ) from None
    library = zstandard.ZstdDecompressor()
    frame = library.decompressobj()
    with path.open("rb") as file:
        while data := file.read(1 << 13):  # little at a time: it may stand for very much
            while data:
                if frame.eof:
                    frame = library.decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                data = frame.unused_data
        if file.tell() and not frame.eof:
            raise EOFError("it ends inside of a compressed frame")


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.rest:
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.rest = memoryview(chunk)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def _split_texts(lines: _Lines) -> Iterator[str]:
    text = io.StringIO(newline="")  # a list of lines would take several times the text
    for line in lines:
        if line.strip() == END_OF_TEXT:
            yield text.getvalue()
            text = io.StringIO(newline="")
        else:
            text.write(line)
    yield text.getvalue()


def _json_texts(file: TextFile, lines: _Lines) -> Iterator[str]:
    for place, value in _json_values(file, lines):
        text = value.get(file.field) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UserError(f"{file.path}, {place}: {_not_a_document(value, file.field)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{file.path}, {place}: \\u{ord(text[error.start]):04x} is half of a character without the other "
                "half, which no encoding can write: mend the text or leave it out"
            ) from None
        yield text


def _json_values(file: TextFile, lines: _Lines) -> Iterator[tuple[str, Any]]:
    """The value of each line, with its place; or the items of an array, which is read whole."""
    remaining = iter(lines)
    for line in remaining:
        place = f"line {lines.count}"
        if file.suffix == ".json" and line.lstrip().startswith("["):
            # Empty lines before it keep the numbers of lines in an error.
            array = "\n" * (lines.count - 1) + line + "".join(remaining)
            for number, value in enumerate(_parse(file, place, array), start=1):
                yield f"item {number}", value
        elif line.strip():
            yield place, _parse(file, place, line)


def _parse(file: TextFile, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file.path}, {place}: this is not JSON ({error}): write one object a line, or in a .json file one array"
        ) from None


def _not_a_document(value: Any, field: str) -> str:
    """Say why a value has no text, and which of its fields does."""
    if not isinstance(value, dict):
        return "expected a JSON object on a line of its own, or in the array of a .json file"
    lengths = {key: len(text) for key, text in value.items() if isinstance(text, str)}
    choice = "none of them is a string"
    if lengths:
        longest = max(lengths, key=lengths.__getitem__)
        choice = f"choose one with {spell('data.text_field')} {longest}"
    fields = ", ".join(map(repr, value)) or "no field"
    return f"expected a string under {field!r}; found {fields}: {choice}"
