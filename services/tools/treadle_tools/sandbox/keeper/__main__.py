"""`python -m treadle_tools.sandbox.keeper FOLDER`: started by the service with the folder's socket as stdin."""

import asyncio
import os
import resource
import socket
import sys
from pathlib import Path

from treadle_tools.sandbox.keeper.keeper import keep

if __name__ == "__main__":
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # whatever the service held: its port must be free when it comes back
    listener = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a cell takes four, and 1024 is a usual limit
    os.chdir("/")  # it may live longer than the folder in which its service was started
    asyncio.run(keep(listener, Path(sys.argv[1])))
