"""python gds_optimizer.py: which path data takes between drive, RAM and GPU here, how fast, and the settings for it.

  python gds_optimizer.py                    everything, under 90 s
  python gds_optimizer.py --quick            the main figures, under 20 s        --full    the whole grid
  python gds_optimizer.py --path /mnt/nvme   measure that drive (repeat for several)
  python gds_optimizer.py --apply            write the recommended settings into deepspeed_config.json
  python gds_optimizer.py --json             the report on stdout                --help    everything else

Writes gds_report.json and machine_profile.json into ~/.local/share/outcore. docs/gds.md explains them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from outcore.install.bootstrap import ensure_environment  # noqa: E402

if __name__ == "__main__":
    ensure_environment(__file__)
    from outcore.probe.command import main

    sys.exit(main(sys.argv[1:], ROOT))
