"""One run of training: assembled, trained to its end, and its failures said in words."""

from outcore.train.loop import TrainingLoop
from outcore.train.run.assemble import Ready
from outcore.train.run.data import default_seq_length
from outcore.train.run.entry import main, run, run_config, start
from outcore.train.run.finish import train_to_end
from outcore.train.run.telling import plain_words
