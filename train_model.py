"""Train a language model far larger than the GPU: `python train_model.py`, or `deepspeed --num_gpus=N train_model.py`.

Without flags: a tiny model on Python's own source, so that everything can be seen to work. `--help` lists all settings.
"""

import sys
import time

from outcore.install.bootstrap import ensure_environment

ensure_environment(__file__)

if __name__ == "__main__":
    began_s = time.perf_counter()
    from outcore.train.command import main

    sys.exit(main(began_s=began_s))
