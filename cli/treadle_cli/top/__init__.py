"""`treadle top`: a mesh that runs, in a terminal."""
