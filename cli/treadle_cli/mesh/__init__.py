"""Run a mesh on one machine: its child processes, checks before they start, and what `treadle up`
keeps running."""
