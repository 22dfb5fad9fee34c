"""`python -m outcore.optim`: build the extension and say where it is; exit code 1 with the reason when it cannot be."""

from __future__ import annotations

import logging
import sys

from outcore.optim.build import ExtensionUnavailable, build_extension


def main() -> int:
    """Build it unless it is built."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(build_extension())
    except (ExtensionUnavailable, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
