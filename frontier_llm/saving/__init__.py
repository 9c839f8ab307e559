"""When the states of a run are saved, where its checkpoints lie, and which one it resumes from.

`checkpoint` writes, commits and reads the files of one checkpoint.
"""
