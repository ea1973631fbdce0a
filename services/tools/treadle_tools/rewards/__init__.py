"""Score trajectories: the reward functions, the judges, and the pool that scores for all jobs."""
