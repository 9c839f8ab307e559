"""Collectives over model states: asynchronous, optionally quantised, with the bytes counted.

Every call takes its process group as an argument and returns a handle without waiting. Activations
are not sent by this package but by the model's layers and by parallel/stage_exchange.py.
"""
