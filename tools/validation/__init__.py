"""Published tables, and what the planner says of their set-ups."""
