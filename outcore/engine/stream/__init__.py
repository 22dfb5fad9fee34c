"""The streaming engine: every layer of a decoder passes through the GPU, its home is RAM (see `schedule`)."""
