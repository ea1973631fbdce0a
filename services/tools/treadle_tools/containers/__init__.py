"""Sandboxes of other kinds than bubblewrap: a Docker container or a Kubernetes pod for each session or call."""
