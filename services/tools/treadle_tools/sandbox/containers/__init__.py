"""Sandboxes that are Docker containers or Kubernetes pods."""
