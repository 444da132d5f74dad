"""Where the `headwater` command begins; `python -m headwater` is the same where no script of that name is on the path.

What the command imports takes a moment, and Ctrl-C then ends it as it does later.
"""

import sys


def main() -> int:
    try:
        from headwater.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("headwater: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
