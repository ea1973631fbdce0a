"""Discrete-event simulator of a rollout: drives the scheduler's own controller under a virtual
clock."""
