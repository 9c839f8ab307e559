"""Published figures of training systems, and the planner's predictions for them."""
