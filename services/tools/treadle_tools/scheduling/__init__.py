"""Decide which waiting action starts now, and on which cores."""
