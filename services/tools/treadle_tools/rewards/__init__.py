"""Rewards: accept them, keep them across restarts, share the slots among jobs, score them, publish how they ended."""
