"""Count how much each rank stores, sends and computes, without torch and without processes.

The trainer allocates buffers and sends messages by these functions, and the planner predicts with
the same functions. A prediction and a run therefore cannot drift apart. `resolved.ResolvedLayout`
turns a configuration into integers. The other modules take single fields, never a configuration.

Vocabulary:
    rank          a process of the run
    axis          one of the three directions of the grid of ranks: tensor, data or pipeline
    dim           one of the directions of a tensor
    data rank     position of a rank on the data axis
    stage         position of a rank on the pipeline axis
    model chunk   consecutive layers that one stage computes; a stage may have several chunks,
                  which are its virtual stages
    unit          the parameters that are gathered and reduced together: the embedding, one layer,
                  or the head
    model states  parameters, gradients, master weights and moments of the optimizer
    factor        number of data ranks over which one copy of a model state is divided ("cut")
    flat buffer   the parameters of a unit one after the other, with padding at the end
    interval      a contiguous part of a flat buffer
    shard         the part of a tensor that one rank stores
    digit         one of four numbers that together identify a data rank (partition.py)
    replica       data ranks that together store one copy of all optimizer states
    refresh       the gather of updated parameters after an optimizer step
    level         of the links between two ranks: inside a package of devices, inside a node, or
                  between nodes (the network)
    hop           a digit, or the part of a digit between two levels
"""
