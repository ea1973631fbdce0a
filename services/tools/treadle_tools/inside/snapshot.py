"""An environment on its way from one cell to another: itself, pickled, and the files of its /tmp, in one tar.

Written and read inside the sandbox only. What is not in the object is not in the snapshot: state of modules, threads,
open files. An environment that needs more says so in `__getstate__` and `__setstate__`.
"""

import io
import os
import pickle
import tarfile
from typing import Any

STATE = "state"
FILES = "tmp"  # and below it, what lies in /tmp


def write(environment: Any, file: int) -> None:
    """Raises whatever pickling raises, and OSError where it becomes larger than a file may."""
    body = pickle.dumps(environment, protocol=pickle.HIGHEST_PROTOCOL)
    with os.fdopen(os.dup(file), "wb") as output, tarfile.open(fileobj=output, mode="w|") as archive:
        state = tarfile.TarInfo(STATE)
        state.size = len(body)
        archive.addfile(state, io.BytesIO(body))
        archive.add(f"/{FILES}", FILES)


def read(file: int) -> Any:
    """The environment, after its files are where they were."""
    body = b""
    with os.fdopen(os.dup(file), "rb") as source, tarfile.open(fileobj=source, mode="r|") as archive:
        # Nothing is to be kept out: what is written anywhere but below /tmp fails, here as for all code in a cell.
        archive.extraction_filter = lambda member, _: member
        for member in archive:
            if member.name == STATE:
                found = archive.extractfile(member)
                body = found.read() if found is not None else b""
            else:
                archive.extract(member, "/")
    return pickle.loads(body)
