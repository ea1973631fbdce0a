"""What runs inside the sandbox: standard library only, started with `python -I -S`, imports no other part of the
service but `treadle_tools.tool`."""
