"""Methods beside the loop's own: trainers of TRL and transformers over a streamed model, as runs like any other."""

from outcore.train.methods.story import run_method
