"""The built-in reward functions. Imported in the sandbox only."""
