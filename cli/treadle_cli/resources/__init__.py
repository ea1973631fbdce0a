"""Resource plans, which name the engines on a mesh's accelerators, and the change from one plan to
another."""
