"""What a run is, decoded once at the door into frozen, typed sections.

Values live in `conf/`; types, units, ranges and the rules that span sections live here. Code
behind the door never sees a dictionary of strings.
"""

from frontier_llm.config.decode import decode
from frontier_llm.config.run import RunConfig

__all__ = ["RunConfig", "decode"]
