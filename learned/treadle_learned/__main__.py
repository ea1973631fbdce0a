"""Train the next version: `python -m treadle_learned --transcripts FILE --models DIR --version
NAME`.

A predictor service runs this as a process of its own, at a low priority. Prints one JSON line on
success; otherwise one line on stderr, and the exit code is 2.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

REFUSED = 2  # exit code
PR_SET_PDEATHSIG = 1  # of prctl(2)


def main(words: Sequence[str] | None = None) -> int:
    """Train and write a version as the arguments state, and return the exit code."""
    parser = argparse.ArgumentParser(prog="treadle_learned", description=__doc__)
    parser.add_argument("--transcripts", type=Path, required=True, help="file that was harvested")
    parser.add_argument("--models", type=Path, required=True, help="folder of versions")
    parser.add_argument("--version", required=True, help="of what is trained")
    parser.add_argument("--seed", type=int, default=0, help="where no version is in use")
    parser.add_argument(
        "--child-of", type=int, default=0, metavar="PID", help="end when that process does"
    )
    parser.add_argument(
        "--backbone", default="", help="where the version in use has none; none: numbers alone"
    )
    options = parser.parse_args(words)
    if options.child_of and not _end_with_parent(options.child_of):
        return REFUSED

    # Imported here: torch takes seconds, in which the parent may end.
    from transformers.utils import logging

    from treadle_learned.checkpoint import ModelsFolder
    from treadle_learned.training import refit
    from treadle_learned.transcript import LearnedError, read_transcripts

    logging.disable_progress_bar()
    try:
        transcripts = read_transcripts(options.transcripts)
        models = ModelsFolder(options.models)
        found = refit(
            transcripts, models, options.version, seed=options.seed, backbone=options.backbone
        )
    except (LearnedError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    print(json.dumps(vars(found)))
    return 0


def _end_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends. Returns False where the parent has
    ended already. A version is whole or not there, whenever that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
