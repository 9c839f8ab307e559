"""Studies on top of frontier_llm/planner: published runs, failures, pages of a plan, drawings."""
