"""The contenders of bench_sharding.py and bench_preprocess.py.

A *contender* is a library with its settings, a *turn* one timed run of it (turn.py). plain_gpt.py
also belongs to bench_step.py.
"""
