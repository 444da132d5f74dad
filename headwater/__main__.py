"""`python -m headwater` is the `headwater` command, also where no script of that name is on the path."""

import sys

from headwater.cli import main

sys.exit(main())
