"""The command `frontier-llm launch`, which prints or submits the Slurm job of an experiment.

`launch_options` has the options of the job, and `launch_checks` what is checked on the login node.
Sweeps submit their trials in the same way.
"""
