"""The keeper: a small process that holds the sandboxes and the table of sessions, and outlives the service."""
