"""Measures the control plane and prints one JSON object: `python bench/control_plane.py`.

See cli/treadle_cli/bench/control_plane.py.
"""

import sys

from treadle_cli.app import app

if __name__ == "__main__":
    app(["bench", "control-plane", "--json", *sys.argv[1:]], prog_name="treadle")
