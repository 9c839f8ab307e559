"""Savers of checkpoints, and what ranks measure, for the two benchmarks of checkpoints."""
