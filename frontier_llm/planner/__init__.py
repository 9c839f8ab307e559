"""Predict before a run whether a layout fits, how fast it is, and which layout is best.

Plain Python on `geometry/` and a cluster file: no torch, no device, no processes. Bytes of model
states, stored and sent, come from the functions that the trainer uses too; times and activations
are modelled, with the constants of `cluster.device.calibration` and `cluster.links`.
"""
