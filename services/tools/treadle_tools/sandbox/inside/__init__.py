"""Code that runs inside the sandbox, started with `python -I -S`.

Its imports: standard library, `tool`.
"""
