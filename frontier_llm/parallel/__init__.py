"""Ranks: how they are started, find each other, are grouped, stopped and mourned.

- `world`: which rank this process is, and the store and process group it shares.
- `launcher`: the parent of local ranks.
- `failure`: what a rank leaves behind when it fails, and which failure was the cause.
- `stop`: the flag that a signal raises.
"""
