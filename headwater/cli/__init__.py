"""The `headwater` command: read flags, call one function, turn a user's error into one message.

Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence

from headwater import __version__
from headwater.cli.generation import generate
from headwater.cli.huggingface import convert, evaluate, revert, serve_check, verify
from headwater.cli.looking import doctor, inspect, report, residuals, scaling
from headwater.cli.models import say
from headwater.cli.training import compare, demo, export, plan, study, train
from headwater.errors import UserError, as_flag, nearest, spelling
from headwater.runs.tables import printable

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "report": report,
    "residuals": residuals,
    "generate": generate,
    "inspect": inspect,
    "convert": convert,
    "revert": revert,
    "verify": verify,
    "serve-check": serve_check,
    "eval": evaluate,
    "plan": plan,
    "export": export,
    "study": study,
    "scaling": scaling,
    "demo": demo,
    "doctor": doctor,
}


# Commands that divide their work among the processes that torchrun has started.
DIVIDED = ("train", "generate")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # A CPU without bf16 prints 25 lines of C++.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    # Messages of every room spell settings as flags here.
    with spelling(as_flag):
        return code_of(words)


def code_of(words: list[str]) -> int:
    """Do what the words say. Returns the exit code, and prints the message of an error."""
    try:
        answer(words)
    except UserError as error:
        return fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader has seen enough, as in `headwater residuals | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it on its way out
        return 0
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C outside of a training step; what was saved is intact", 130)
    except OSError as error:
        if error.strerror is None:
            raise
        return fail(f"{error.strerror}: {error.filename or 'while writing'}", 1)
    return 0


def answer(words: list[str]) -> None:
    """Do what the words say."""
    # `headwater help train` is `headwater train --help`.
    if words[0:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        say(usage())
    elif words[0] in ("-V", "--version"):
        say(f"headwater {__version__}")
    elif words[0] not in COMMANDS:
        raise UserError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS)}")
    else:
        refuse_ranks(words[0])
        COMMANDS[words[0]](words[1:])


def refuse_ranks(name: str) -> None:
    """Refuse to do the same work, and write the same files, once in every process of torchrun."""
    # A cluster may have WORLD_SIZE in its shells too, where a command is started by hand.
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ and count > 1 and name not in DIVIDED:
        raise UserError(
            f"{name} is the work of one process, and torchrun has started {count}: start "
            f"headwater {name} without it; the commands for several are {' and '.join(DIVIDED)}"
        )


def usage() -> str:
    # A command's text is the docstring of its function.
    lines = ["headwater: the residual stream as a part you can swap.", ""]
    lines += ["usage: headwater COMMAND [FLAGS]", ""]
    for name, function in COMMANDS.items():
        lines.append(f"  {name:<11} {(function.__doc__ or '').strip()}")
    lines += ["", "headwater COMMAND --help lists the flags of a command."]
    lines += ["headwater --version says which version this is."]
    return "\n".join(lines)


def fail(message: str, code: int) -> int:
    print(f"headwater: {printable(message)}", file=sys.stderr, flush=True)
    return code
