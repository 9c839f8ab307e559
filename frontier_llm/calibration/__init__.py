"""Measure this machine for frontier-llm calibrate."""
