"""Integers only: who holds what, what is sent, what is computed. No torch, no processes.

The trainer allocates and sends by these functions and a planner predicts by the same ones, so
prediction and run cannot drift apart.

Words, one for one thing:
    rank      a process; `axis` is one of the grid's three directions, `dim` one of a tensor's
    stage     a rank's place in the pipeline; `chunk` one of its pieces of the model
    piece     the layers of one (stage, chunk), in the model's order
    unit      what is gathered and reduced together: the embedding, a layer, the head
    factor    over how many ranks one copy is cut
    interval  a contiguous part of a flat buffer
    shard     what one rank stores of a tensor
    digit     one of the four numbers a, b, c, d of a data rank; a state's flows run along one
    replica   data ranks that together hold one copy of all optimizer states
    link      how far apart two ranks are: inside a node (intra) or between nodes (inter)
"""
