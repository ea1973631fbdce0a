"""Checks of a machine, of SGLang servers and of a mesh, for `treadle doctor` and `treadle
attach`."""
