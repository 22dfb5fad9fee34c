"""Training: configuration, the loop, checkpoints, export, and advice when a tier fills."""
