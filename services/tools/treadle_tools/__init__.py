"""Run tools, environments and rewards. Nothing is imported here: the sandbox imports this package
too."""
