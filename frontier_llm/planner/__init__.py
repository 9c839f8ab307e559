"""Predict before a run whether a layout fits, how fast it is, and which layout is best.

The planner is plain Python on top of `geometry/` and a cluster file. It needs no torch, no device
and no processes. The bytes of model states, stored and sent, come from functions that the trainer
also uses. Times and activations are modelled with the constants in `cluster.device.calibration` and
`cluster.links`. A run calls `choice` for each value `auto`, and the check (`fit_check`);
`frontier-llm plan` searches all layouts (frontier_lab/planning).
"""
