"""Model states on flat buffers: parameters, gradients, master weights and moments.

Every unit (embedding, layer, head) has one flat buffer of each; megatron's parameters are views
into it. The face is `ShardedStates`; it knows process groups and `ParameterRecord`s only.
"""
