"""Training: the objects of a rank (assemble), the loop over steps (loop), one step (step)."""
