"""Callbacks record and watch a run: metrics, reports, traces, slow ranks and divergence.

The training loop calls them at fixed moments. callback.py lists the moments, callback_list.py the
callbacks and their order.
"""
