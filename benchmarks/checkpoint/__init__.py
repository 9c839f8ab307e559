"""Modules of benchmarks/bench_checkpoint.py: savers, the states they save, turns and results."""
