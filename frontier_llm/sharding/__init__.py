"""Model states on flat buffers: parameters, gradients, master weights and moments.

Every unit (embedding, layer, head) has one flat buffer for each of these states; megatron's
parameters are views into the parameter buffer. `ShardedStates` is the interface of this package,
which uses process groups and `ParameterRecord`s but does not import megatron.
"""
