"""The configuration of a run: frozen, typed sections, decoded once when the program starts.

Values are in `conf/`; types, units, ranges and the rules that span sections are here. All other
packages get a `RunConfig`, never a dictionary of strings.
"""

from frontier_llm.config.decode import decode
from frontier_llm.config.run import RunConfig

__all__ = ["RunConfig", "decode"]
