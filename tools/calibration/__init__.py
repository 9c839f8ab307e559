"""Measurements behind tools/calibrate.py."""
