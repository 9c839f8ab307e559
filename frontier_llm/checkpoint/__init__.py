"""Save the training states of all ranks, and load them again in any parallel layout.

A file stores each element under the name of its tensor and its position in that tensor of the whole
model. No file therefore depends on the layout that wrote it. `manager` is the interface of this
package for a run.
"""
