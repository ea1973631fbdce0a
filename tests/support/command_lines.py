"""The command line of a process that may end while it is being looked at."""

import psutil


def command_line(process: psutil.Process) -> str:
    """Its words with blanks between; empty once it has ended, or waits only to be cleared up."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
