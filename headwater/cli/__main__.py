"""`python -m headwater.cli`, as torchrun starts it, is the `headwater` command."""

import sys

from headwater.cli import main

sys.exit(main())
