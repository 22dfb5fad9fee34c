"""Asked of the processor once for all forked children: DeepSpeed's CPU optimizer asks anew for each engine, 1.2 s each.

Import it before deepspeed, which keeps the function under a name of its own.
"""

import functools

import cpuinfo

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
