"""Conversations with pictures for a model that sees, in processes of their own. Apart from its neighbours, because its
processor needs torch, which they do not import."""

from outcore.apart.pictures.bench import PictureBench
