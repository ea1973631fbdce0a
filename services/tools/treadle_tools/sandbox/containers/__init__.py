"""Make sandboxes that are Docker containers or Kubernetes pods."""
