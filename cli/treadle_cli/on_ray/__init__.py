"""A mesh whose services and sidecars are actors of a Ray cluster, beside engines that are actors
too."""
