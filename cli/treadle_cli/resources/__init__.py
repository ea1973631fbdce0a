"""Resource plans: which engines run on the accelerators of a mesh, and the change from one plan to
another."""
