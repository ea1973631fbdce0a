"""The service's side of the sandbox: bubblewrap, zygotes, cells, cgroups. Nothing of a tool's code is imported here."""
