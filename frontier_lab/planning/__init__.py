"""Studies on top of frontier_llm/planner: the search of layouts, published runs, drawings."""
