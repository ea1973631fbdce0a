"""What `container_broken_tools` names."""

raise RuntimeError("no module of this name can be had here")
