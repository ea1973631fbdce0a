"""A web page that shows what the mesh does: facts in, views out."""
