"""Tools and studies that no training run needs: jobs, layouts, sweeps, machines, other formats.

`frontier-llm` finds the commands of this package by name. The package imports frontier_llm, which
never imports it.
"""

import frontier_llm  # noqa: F401  (before megatron-core, as in every process of the program)
