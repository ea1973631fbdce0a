"""Run `treadle top`: show a mesh that runs, in a terminal."""
