"""Put the mesh behind the interfaces of RL frameworks: one module each, which only users of that
framework import.

All of them share `calls`; `sessions` finds the trajectory that a request continues.
docs/frameworks/ has the settings.
"""
