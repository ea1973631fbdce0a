"""What a service and its keeper say to each other, one frame each (`channel.py`).

The service: `hello` first (protocol, recipes, spares, cgroups, keep_s); then `want` (tool, count), `away` (cell),
`bind` (record, cell), `note` (session, facts), `forget` (session, closed_by), `end`. None of them is answered: they are
carried out in their order, also those that a service left behind when it was killed.
The keeper: `welcome` (cgroups, closed), a `session` (record, and its cell if it lives) each, `ready`; then `cell` and
`failed` as cells are made. A cell comes with one descriptor: a line to its first process.
"""

# Raised with every change that an older keeper, or a cell that an older worker has made, would not understand. Such a
# keeper ends when it is greeted, and its sessions with it.
PROTOCOL = 1

# What names a message, and its other fields.
OP = "op"
HELLO, WANT, AWAY, BIND, NOTE, FORGET, END = "hello", "want", "away", "bind", "note", "forget", "end"
WELCOME, SESSION, READY, CELL, FAILED = "welcome", "session", "ready", "cell", "failed"
