"""Stateful environments: opened, stepped, kept through a restart, copied, closed."""
