"""The `headwater` command. Thin: it reads flags, calls one function, and turns a user's error into one message.

Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from headwater import __version__
from headwater.cli.flags import flag_of
from headwater.cli.generation import generate
from headwater.cli.huggingface import convert, evaluate, revert, verify
from headwater.cli.looking import doctor, inspect, matrix, report, residuals, scaling
from headwater.cli.models import say
from headwater.cli.training import compare, demo, export, plan, study, train
from headwater.errors import UserError, as_flag, nearest, spelling

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "report": report,
    "matrix": matrix,
    "residuals": residuals,
    "generate": generate,
    "inspect": inspect,
    "convert": convert,
    "revert": revert,
    "verify": verify,
    "eval": evaluate,
    "plan": plan,
    "export": export,
    "study": study,
    "scaling": scaling,
    "demo": demo,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    with spelling(as_flag):
        return answer(argv)


def answer(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings(
        "ignore", message="mkldnn_matmul failed"
    )  # 25 lines of C++ on a CPU without bf16
    if words[0:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        say(usage())
        return 0
    if words[0] in ("-V", "--version"):
        say(f"headwater {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise UserError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS)}")
        refuse_ranks(words[0])
        COMMANDS[words[0]](words[1:])
    except UserError as error:
        return fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader has seen enough, as in `headwater residuals | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it on its way out
        return 0
    except KeyboardInterrupt:
        return fail(
            "stopped by Ctrl-C outside of a training step; what was saved before is intact", 130
        )
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise
        again = "with --resume" if words[0] in ("train", "compare") else "again"
        flag = flag_of(words, error.filename)
        told = NOT_MADE if error.errno == errno.ENOENT and flag else SYSTEM_ERRORS[error.errno]
        advice = told.format(flag=flag or "--out", again=again)  # which has a default
        return fail(f"{error.strerror}: {error.filename or 'while writing'}. {advice}", 1)
    return 0


DIVIDED = ("train", "generate")  # among the processes that torchrun has started


def refuse_ranks(command: str) -> None:
    """Others would do the same work once in every process, and write the same files. A cluster may have WORLD_SIZE in
    its shells too, where a command is started by hand."""
    started = "TORCHELASTIC_RUN_ID" in os.environ
    if started and command not in DIVIDED and (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"{command} is the work of one process, and torchrun has started {count}: start headwater {command} "
            f"without it; the commands for several are {' and '.join(DIVIDED)}"
        )


SYSTEM_ERRORS = {
    errno.ENOSPC: "Make room, then run the same command {again}",
    errno.EDQUOT: "Make room, then run the same command {again}",
    errno.EACCES: "Allow this user to read it; or, where it was to be written, choose another folder with {flag}",
    errno.EROFS: "Choose a folder that you may write to with {flag}",
    errno.ENOTDIR: "A file stands where a folder is needed: choose another path with {flag}",
    errno.EEXIST: "A file stands where a folder is needed: choose another path with {flag}",
    errno.EISDIR: "A folder stands where a file is needed: choose another path with {flag}",
    errno.ENOENT: "It was there a moment ago, or the path is wrong: run the command again",
}
NOT_MADE = "It cannot be made there, or was removed meanwhile: choose another path with {flag}"


def usage() -> str:
    lines = [
        f"  {name:<10} {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()
    ]
    about = "headwater: the residual stream as a part you can swap.\n\nusage: headwater COMMAND [FLAGS]\n"
    more = "\nheadwater COMMAND --help lists the flags of a command; headwater --version says which one this is."
    return "\n".join([about, *lines, more])


def fail(message: str, code: int) -> int:
    print(f"headwater: {message}", file=sys.stderr, flush=True)
    return code
