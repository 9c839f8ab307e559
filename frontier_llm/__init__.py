"""Pretraining of GPT and encoder-decoder models, cut by tensor, pipeline and sharded data axes."""

__version__ = "0.1.0"
