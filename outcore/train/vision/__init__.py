"""Training of image-text models: transformers' own model and Trainer over streamed layers."""

from outcore.train.vision.run import train_vision
