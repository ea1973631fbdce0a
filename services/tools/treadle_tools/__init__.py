"""The tools service. Nothing here at import: the sandbox imports this package too."""
