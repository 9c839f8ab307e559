"""What will fit, how fast it will be, and which layout is best: said before the run.

Plain Python on `geometry/` and a cluster file: no torch, no device, no processes. States and bytes
on the wire come from the functions that the trainer allocates and sends by; times and activations
are modelled, with the constants of `cluster.device.calibration` and `cluster.links`.
"""
