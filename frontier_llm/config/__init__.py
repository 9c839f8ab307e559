"""The configuration of a run: frozen, typed sections that are decoded once when a program starts.

The values are in `conf/`. This package defines types, units and ranges, and the rules that concern
several sections. All other packages get a `RunConfig`, never a dictionary of strings.
"""

from frontier_llm.config.decode import decode
from frontier_llm.config.run import RunConfig

__all__ = ["RunConfig", "decode"]
