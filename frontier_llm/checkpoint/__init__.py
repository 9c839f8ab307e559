"""Save the training states of all ranks and load them again, under any layout.

Stored elements are placed by tensor name and position in the global tensor, so no file depends on
the layout that wrote it.
"""
