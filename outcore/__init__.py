"""outcore: train, run and evaluate language models far larger than the GPU, on one workstation."""

__version__ = "0.1.0"
