"""Declare and call tools, rewards, judges and GPU services over HTTP."""
