"""Build the models from megatron-core's modules.

`build.build_model` is the entry point, which trainer/assemble.py calls. A rank holds one or several
*model chunks*, ranges of consecutive layers. The package builds their modules, sets the initial
weights, and describes each parameter by a *record* with its name in the whole model.
"""
