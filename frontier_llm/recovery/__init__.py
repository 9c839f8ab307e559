"""How a run goes on when a rank dies: the ranks agree where to continue, with states in memory.

`generations.run_member` does the work of every rank, also in runs that replace nobody.
"""
