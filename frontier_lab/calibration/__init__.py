"""Measure the speed of this machine, for the cluster file that frontier-llm calibrate writes."""
