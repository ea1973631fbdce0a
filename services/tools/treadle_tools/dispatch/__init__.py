"""Whose turn it is: what an action asks for, when it starts, what it runs on, and how long it took."""
