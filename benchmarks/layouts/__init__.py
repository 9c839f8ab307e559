"""Compare planned and measured layouts on CPU ranks, for planner_layouts.py."""
