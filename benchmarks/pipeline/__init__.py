"""Modules of benchmarks/bench_pipeline.py: contenders, megatron's schedules, and measurements."""
