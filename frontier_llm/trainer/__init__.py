"""The training itself: what a step is, the loop around it, and how a rank is put together."""
