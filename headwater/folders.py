"""Folders: which one `~` names, and writing one whole or not at all. No torch here."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def at_home(path: str | Path) -> Path:
    """A path with `~` as a folder of one's own; a name that begins with one and is nobody's stays, as in a shell."""
    return Path(os.path.expanduser(path))


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, or, if `out` is there already, one inside whose files move up:
    it may be a volume of its own. If anything goes wrong, Ctrl-C included, nothing is left.

    Raises OSError where safetensors names an error of the system, such as a full disk, in words alone.
    """
    from safetensors import SafetensorError  # so that a report is made without it

    if out.exists() and not out.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(out))
    partial = (out if out.exists() else out.parent) / f".{out.name}.{uuid.uuid4().hex[:8]}"
    partial.mkdir(parents=True)
    try:
        yield partial
        if partial.parent == out:
            for path in partial.iterdir():
                path.replace(out / path.name)
        else:
            partial.rename(out)
    except SafetensorError as error:
        if (named := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(named[1]), os.strerror(int(named[1])), str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
