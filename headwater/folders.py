"""Files and folders that are written whole or not at all, and the hashes beside them.

What is written stands under another name until it is complete and on the disk; then one rename puts
it in its place. So a reader never sees half of it, and after a power cut it is there or it is not.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import Interrupted, UserError

HASHES = "SHA256SUMS"  # in the shell's own format: `sha256sum -c SHA256SUMS` checks a folder too
HASHED = ("*.safetensors", "tokenizer.json")  # in these files a flipped bit would go unnoticed
PAIR = Path(__file__).parent / "demo_pair"  # two trained models that come with the package


def at_home(path: str | Path) -> Path:
    """Expand `~` as a shell does; a name that begins with `~` and is nobody's stays."""
    return Path(os.path.expanduser(path))


def find_model(path: str | Path) -> Path:
    """Return the folder of a model.

    `demo` is the model with Block Attention Residuals of the pair in the package, unless a folder has this name;
    `demo/standard` is the plain model beside it.
    """
    folder = at_home(path)
    if folder.parts[:1] != ("demo",) or folder.exists():
        return folder
    return PAIR.joinpath(*folder.parts[1:] or ("attnres-block",))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> str:
    """Write, sync and hash a file in one pass; returns the hash."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in content:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to. At the end it is renamed to `path`; after an error it is removed."""
    scratch = path.with_name(f".tmp-{path.name}")
    scratch.unlink(missing_ok=True)
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one rename: a reader sees the old content or the new."""
    with whole_file(path) as scratch:
        scratch.write_bytes(content)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give a hidden folder to write to, which becomes `out` at the end, or nothing after an error.

    If `out` is there already, the hidden folder stands inside and its files move up: `out` may be a
    volume of its own. What a killed process has left is removed by the next call. Hashes of weights
    and tokenizer go into SHA256SUMS.

    Raises OSError that names `out` for an error of the system, such as a full disk, which
    safetensors says in words.
    """
    partial = (out if out.exists() else out.parent) / f".tmp-{out.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _signals_interrupt():
            yield partial
            _add_missing_hashes(partial, out)
            for path in partial.rglob("*"):
                sync(path)
            sync(partial)
            _put_in_place(partial, out)
    except Exception as error:
        system_error = _system_error(error, partial, out)
        if system_error is None:
            raise
        raise system_error from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, out: Path) -> None:
    if partial.parent != out:
        partial.rename(out)
        sync(out.parent)
        return
    # Without config.json a folder is no model, so that file comes last.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(out / path.name)
    sync(out)


def _system_error(error: Exception, partial: Path, out: Path) -> OSError | None:
    """Turn an error of the system about the hidden folder into one about `out`; None for others."""
    words = re.search(r"\(os error (\d+)\)", str(error))
    if type(error).__name__ == "SafetensorError" and words is not None:
        number = int(words[1])
    elif isinstance(error, OSError) and str(error.filename).startswith(str(partial)):
        number = error.errno or 0
    else:
        return None
    return OSError(number, os.strerror(number), str(out))


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise inside, as Ctrl-C does, where nobody else handles them."""
    # Python sets handlers in the main thread alone.
    main = threading.current_thread() is threading.main_thread()
    signals = [signal.SIGTERM, signal.SIGHUP] if main else []
    unhandled = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(f"ended by {signal.Signals(signum).name}; nothing was written", signum)


def read_hashes(folder: Path) -> dict[str, str]:
    """Return file name to hash, as SHA256SUMS lists them; empty where there is no such file."""
    path = folder / HASHES
    if not path.is_file():
        return {}
    hashes = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
        if match is None:
            raise UserError(f"{path} is damaged: {line[:80]!r} is not a hash and a name")
        hashes[match[2]] = match[1]
    return hashes


def write_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    if not hashes:
        return
    lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
    (folder / HASHES).write_text("".join(lines), encoding="utf-8")


def _add_missing_hashes(partial: Path, out: Path) -> None:
    """Hash what was written. Linked files keep the hash of the folder that they come from."""
    hashes = read_hashes(partial)
    for path in sorted(path for pattern in HASHED for path in partial.glob(pattern)):
        if path.name not in hashes and path.stat().st_nlink == 1:
            hashes[path.name] = hash_file(path)
    write_hashes(partial, read_hashes(out) | hashes)


def check_hashes(folder: Path) -> None:
    """Raise UserError if a file of a folder is not what its SHA256SUMS says."""
    for name, digest in read_hashes(folder).items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing, which {HASHES} beside it lists")
        if hash_file(path) != digest:
            raise UserError(
                f"{path} is not what was written: its hash is not that of {HASHES}. Take it from a copy, or, if "
                f"you have replaced it yourself, remove {folder / HASHES}"
            )
