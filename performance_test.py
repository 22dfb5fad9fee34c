"""python performance_test.py: before a long run - will it fit, how fast will it be, is this machine healthy.

  python performance_test.py --preset llama-3b --dataset notes/     the same flags as train_model.py, under 3 minutes
  python performance_test.py --quick                                three steps of the default run

Tries the run for a few steps, sets them against the planner's forecast, and says GO (exit code 0), GO WITH WARNINGS (3)
or NO-GO (1), with reasons. Writes performance_report.json beside the machine profile. docs/performance.md explains it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from outcore.install.bootstrap import ensure_environment  # noqa: E402

if __name__ == "__main__":
    ensure_environment(__file__)
    from outcore.performance.command import main

    sys.exit(main(sys.argv[1:], ROOT))
