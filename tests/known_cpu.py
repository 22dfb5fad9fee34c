"""The processor is asked once for all forked children."""

import cpuinfo

from outcore.engine.deepspeed.environment import ask_processor_once

ask_processor_once()
cpuinfo.get_cpu_info()
