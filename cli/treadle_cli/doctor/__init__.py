"""Check a machine, SGLang servers and a mesh, for `treadle doctor` and `treadle attach`."""
