"""Run tools in sandboxes of bubblewrap, Docker or Kubernetes.

The service imports no code of a tool.
"""
