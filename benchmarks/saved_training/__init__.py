"""Parts of benchmarks/checkpoint_in_training.py: real training with exchanged savers.

save_phases.py says when steps are saved, training_savers.py has the savers, scheduled_manager.py
takes the place of the run's checkpoint manager and measures, training_runs.py starts the runs,
save_limits.py predicts the times, and training_results.py makes the tables.
"""
