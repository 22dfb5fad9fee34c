"""One run of training: assembled, trained to its end, and its failures said in words."""

from outcore.train.loop import Trainer
from outcore.train.run.assemble import Ready
from outcore.train.run.data import default_seq_length
from outcore.train.run.entry import main, run_config
