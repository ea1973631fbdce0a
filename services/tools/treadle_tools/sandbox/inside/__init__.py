"""Code that runs inside the sandbox, started with `python -I -S`. It imports the standard library, `treadle_tools.tool`
and `treadle_tools.limits` only.
"""
