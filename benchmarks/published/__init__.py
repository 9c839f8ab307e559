"""Published training speeds of other systems, and the planner's predictions for them."""
