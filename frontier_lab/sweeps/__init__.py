"""Trials over a grid, a search or a funnel, and their report. Uses hydra's launchers."""
