"""Discrete-event simulator of a rollout, which drives the scheduler's own controller under a
virtual clock."""
