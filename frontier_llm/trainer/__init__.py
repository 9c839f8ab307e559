"""Training a model on one rank of a run.

`assemble` builds the objects of the rank, `loop` runs all steps, and `step` runs one step.
`callbacks` records what happens. If ranks can be replaced, `generations` takes the place of
`assemble.run`: it builds the objects again after each death, and continues from memory.
"""
