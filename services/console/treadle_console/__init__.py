"""A web page that shows what the mesh does: the console reads facts and returns views."""
