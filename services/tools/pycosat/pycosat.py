"""Stand in for pycosat, so that reasoning-gym can be imported on a machine without a C compiler.

Of reasoning-gym only `zebra_puzzles` solves clauses. Making such a puzzle raises PycosatMissing.
"""

from collections.abc import Iterable, Iterator


class PycosatMissing(RuntimeError):  # noqa: N818 - a state of the machine more than an error
    """pycosat is not installed; the message gives the commands that install it."""


def itersolve(clauses: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """Raise PycosatMissing instead of solving `clauses`."""
    raise PycosatMissing(
        "zebra puzzles need pycosat, which pip builds with a C compiler: "
        "apt-get install gcc python3-dev, then pip install --force-reinstall pycosat==0.6.6"
    )
