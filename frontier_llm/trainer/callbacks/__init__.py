"""Callbacks: everything that follows a run without being part of its training loop.

callback.py lists the moments, built_in.py the order, and each other file is one callback.
"""
