"""Runs whose ranks are killed, and what their comparison with an undisturbed run has shown."""
