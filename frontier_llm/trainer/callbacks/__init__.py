"""Callbacks record and watch a run: metrics, reports, traces, slow ranks and divergence.

The training loop calls them at fixed moments. callback.py lists the moments, built_in.py lists the
callbacks and their order, and each other file has one callback.
"""
