"""Run inside the sandbox, started with `python -I -S`.

The modules import the standard library and `tool` only.
"""
