"""Where text comes from: files in a fixed order, and the documents inside them.

A text file is one document, or several separated by lines that read `<|endoftext|>`; a .jsonl file has one document a
line, under "text" or the field that is named, and so has a .json file, unless it is an array of documents. Each may be
compressed (.gz, .xz, .zst). The default corpus needs no download: the source and documentation of Python's standard
library.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.train.data.tokenizer import END_OF_TEXT
from headwater.train.files import from_here

if TYPE_CHECKING:
    from typing_extensions import Buffer as WriteableBuffer

STDLIB = "stdlib"
KINDS = 5  # of files that are left out, which a line names
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
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
    def place(self) -> str:
        """What the file is, whatever link led to it; a library may hold links to its own files, as Debian's Python."""
        return os.path.realpath(self.path) if self.strict else os.path.abspath(self.path)


@dataclass(frozen=True)
class Document:
    key: str
    text: str


def find_files(sources: tuple[str, ...], field: str = "text") -> list[TextFile]:
    """Every text file of the sources, each source's files sorted by name."""
    if not sources:
        raise UserError(f"no corpus was named: give files or folders with --source, or {STDLIB!r}")
    files: list[TextFile] = []
    for source in sources:
        files += _stdlib_files() if source == STDLIB else _user_files(at_home(source), field)
    names: dict[str, str] = {}
    for file in files:  # by its name a document is held out or not
        if names.setdefault(file.place, file.name) != file.name:
            raise UserError(
                f"{file.place} is there twice, as {names[file.place]} and as {file.name}: the same text could be "
                "trained on and held out. Name it, or the folder that holds it, once with --source, and leave "
                "out links to it"
            )
    return files


def left_out(sources: tuple[str, ...], files: list[TextFile]) -> list[str]:
    """A line for each folder of the sources that holds visible files which are not among those found."""
    read, lines = {file.place for file in files}, []
    for source in dict.fromkeys(sources):
        folder = at_home(source)
        if source != STDLIB and folder.is_dir():
            there = list(_visible(folder))
            others = [path for path in there if os.path.realpath(path) not in read]
            kinds = Counter(_kind(path) for path in others)
            if kinds:
                listing = ", ".join(
                    f"{kind} {count}" for kind, count in sorted(kinds.most_common(KINDS))
                )
                listing += ", and others" if len(kinds) > KINDS else ""
                lines.append(
                    f"{source}: {len(others)} of {len(there)} files are left out ({listing}): from a folder only "
                    f"{' '.join(SUFFIXES)} are read, compressed or not; name the others one by one"
                )
    return lines


def documents(files: list[TextFile]) -> Iterator[Document]:
    """The documents of the files in order; blank ones are dropped."""
    for file in files:
        lines = _Lines(file)
        try:
            texts = _json_texts(file, lines) if _is_json(file) else _split_texts(lines)
            kept = ((number, text) for number, text in enumerate(texts) if text.strip())
            yield from (Document(f"{file.name}#{number}", text) for number, text in kept)
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
            for self.count, line in enumerate(lines, start=1):
                yield line

    @property
    def place(self) -> str:
        return f"{self.file.path} (after line {self.count})" if self.count else str(self.file.path)


def _stdlib_files() -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = [
            name for name in inside if name not in STDLIB_SKIPS
        ]  # never walk into site-packages
        found += [Path(folder, name) for name in names if name.endswith((".py", ".txt", ".rst"))]
    if not found:
        raise UserError(
            f"this Python keeps no standard library sources under {root}: name a corpus with --source"
        )
    return [
        TextFile(path.relative_to(root).as_posix(), path, strict=False) for path in sorted(found)
    ]


def _user_files(source: Path, field: str) -> list[TextFile]:
    if source.is_file():
        return [TextFile(source.name, source, field=field)]
    if not source.is_dir():
        raise UserError(
            f"no corpus at {from_here(source)}: --source takes text, .jsonl or .json files, folders, or {STDLIB!r}; "
            "a run that goes on needs the text that it began with, and --source says where that is now"
        )
    found = sorted(path for path in _visible(source) if _kind(path) in SUFFIXES)
    if not found:
        raise UserError(
            f"the corpus folder {source} is empty: it holds no file that ends in {', '.join(SUFFIXES)}; others, such "
            "as .json, are read if --source names each of them"
        )
    return [TextFile(path.relative_to(source).as_posix(), path, field=field) for path in found]


def _visible(source: Path) -> Iterator[Path]:
    """The files of a folder and of those inside of it, of which each is entered once, by its own name before links to
    it, and never what the folder lies in; and what may not be entered, or is a run of headwater. What is hidden is a
    program's own, such as an editor's copies of texts."""
    folders, links, entered = (
        [source],
        list[Path](),
        {str(folder) for folder in source.resolve().parents},
    )
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        if (place := os.path.realpath(folder)) in entered:
            continue
        entered.add(place)
        if folder != source and _is_run(folder):
            yield folder
            continue
        try:
            visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
            inside = {path: path.is_dir() for path in visible}
        except PermissionError:  # as lost+found on a disk of one's own
            if folder == source:
                raise
            yield folder
            continue
        for path, is_folder in inside.items():
            if is_folder:
                (links if path.is_symlink() else folders).append(path)
            elif path.is_file():
                yield path


def _is_run(folder: Path) -> bool:
    """Whether a run, or its comparison, wrote this folder: metrics and logs are no text, and change as it goes on."""
    pairs = (("config.json", "metrics.jsonl"), ("launch.json", "log.txt"))
    return any(all(os.path.isfile(folder / name) for name in pair) for pair in pairs)


def _kind(path: Path) -> str:
    """As a line about what is left out has it."""
    if path.is_dir():
        return "runs of headwater" if _is_run(path) else "folders that may not be read"
    return _plain_suffix(path) or path.suffix or "no suffix"


def _plain_suffix(path: Path) -> str:
    """In small letters; of a compressed file, that of what is in it."""
    return Path(path.stem if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def _is_json(file: TextFile) -> bool:
    return ".jsonl" in map(str.lower, file.path.suffixes) or _plain_suffix(file.path) == ".json"


class _Zstd(io.RawIOBase):
    """The bytes of a .zst file, of all its frames: the package's own reader ends after the first, and takes a file that
    was cut off for a whole one."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(
                f"{path}: to read .zst, Python needs a package: pip install 'headwater[zst]'"
            ) from None
        self.frame, self.error = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self.file, self.now, self.ready = path.open("rb"), self.frame(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self.ready:
            given = self.now.unused_data or self.file.read(1 << 17)
            if not given and self.file.tell() and not self.now.eof:
                raise EOFError("it ends inside of a compressed frame")
            if not given:
                return 0
            if self.now.eof:
                self.now = self.frame()
            try:
                self.ready = self.now.decompress(given)
            except self.error as error:
                raise OSError(str(error)) from None
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self.ready))
        view[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def _open(file: TextFile) -> IO[str]:
    # A mark that the encoding is UTF-8 may open a JSON file without being part of it; in a text file it is text.
    # newline="" keeps \r\n as written: a corpus is bytes, and bits per byte must count them all.
    encoding = "utf-8-sig" if _is_json(file) else "utf-8"
    errors = "strict" if file.strict else "replace"
    suffix = file.path.suffix.lower()
    if suffix == ".zst":
        return io.TextIOWrapper(
            io.BufferedReader(_Zstd(file.path)), encoding=encoding, errors=errors, newline=""
        )
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)
    return opener(file.path, "rt", encoding=encoding, errors=errors, newline="")  # type: ignore[operator]


def _split_texts(lines: Iterable[str]) -> Iterator[str]:
    text: list[str] = []
    for line in lines:
        if line.strip() == END_OF_TEXT:
            yield "".join(text)
            text = []
        else:
            text.append(line)
    yield "".join(text)


def _json_texts(file: TextFile, lines: Iterable[str]) -> Iterator[str]:
    for place, found in _json_values(file, lines):
        text = found.get(file.field) if isinstance(found, dict) else found
        if not isinstance(text, str):
            raise UserError(f"{file.path}, {place}: {_not_a_document(found, file.field)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{file.path}, {place}: \\u{ord(text[error.start]):04x} is half of a character without the other "
                "half, which no encoding can write: mend the text or leave it out"
            ) from None
        yield text


def _json_values(file: TextFile, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What is on each line; or the items of an array, which a .json file may be, and which is read whole."""
    lines = iter(lines)
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("[") and _plain_suffix(file.path) == ".json":
            try:
                items = json.loads("\n" * (number - 1) + line + "".join(lines))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{file.path} begins as a JSON array and cannot be read as one ({error}): mend it, or write one "
                    "object a line"
                ) from None
            yield from ((f"item {item}", found) for item, found in enumerate(items, start=1))
        elif line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            yield f"line {number}", found


def _not_a_document(found: Any, field: str) -> str:
    """Why this has no text, and which of its fields do."""
    if not isinstance(found, dict):
        return "expected a JSON object on a line of its own, or in the array of a .json file"
    texts = sorted(
        (key for key, value in found.items() if isinstance(value, str)),
        key=lambda key: -len(found[key]),
    )
    choice = f"choose one with --text-field {texts[0]}" if texts else "none of them is a string"
    return f"expected a string under {field!r}; found {', '.join(map(repr, found)) or 'no field'}: {choice}"
