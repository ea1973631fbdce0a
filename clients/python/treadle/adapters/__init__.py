"""The mesh behind the interfaces of RL frameworks: one module each, which only users of that
framework import.

`calls` is what all of them share, `sessions` finds the trajectory that a request goes on with. What
to set is in docs/frameworks/.
"""
