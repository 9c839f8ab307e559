"""Training a model on one rank of a run.

`assemble` builds the objects of the rank, `loop` runs all steps, and `step` runs one step.
`callbacks` records what happens. `recovery.generations` calls them.
"""
