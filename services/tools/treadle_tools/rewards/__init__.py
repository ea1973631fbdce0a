"""Rewards: accepted, journaled, shared out among jobs, scored, told."""
