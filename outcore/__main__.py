"""`python -m outcore`: the console command, where its folder is not on PATH."""

import sys

from outcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
