"""Change which engines a mesh has: attach servers, drain an engine, apply a plan."""
