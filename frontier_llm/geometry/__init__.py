"""Who stores, sends and computes how much, in integers. No torch, no processes.

The trainer allocates and sends by these functions and the planner predicts with the same ones, so
that a prediction and a run cannot drift apart. `resolved.ResolvedLayout` is where a configuration
is turned into integers; the other modules take fields, never a whole configuration.

Vocabulary:
    rank         a process; `axis` is one of the grid's three directions, `dim` one of a tensor's
    stage        position of a rank on the pipeline axis
    model chunk  the layers of one (stage, virtual stage), in the model's order
    unit         the parameters that are gathered and reduced together: the embedding, one layer,
                 the head
    factor       number of ranks over which one copy of a model state is cut
    interval     a contiguous part of a flat buffer
    shard        the part of a tensor that one rank stores
    digit        one of the four numbers that a data rank is written as (partition.py)
    replica      data ranks that together hold one copy of all optimizer states
    link         the connection between two ranks: inside a node (intra) or between nodes (inter)
"""
