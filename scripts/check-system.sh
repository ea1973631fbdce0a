#!/usr/bin/env bash
# Checks what pip cannot install: Python 3.11 or newer that can make virtual environments. README.md lists what more
# programs add to the tests, which are skipped without them.
set -euo pipefail
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
  echo "Treadle needs Python 3.11 or newer, and there is no $python: set PYTHON=/path/to/python3.11" >&2
  exit 1
fi
"$python" - <<'PY' || exit 1
import sys

if sys.version_info < (3, 11):
    sys.exit(f"Treadle needs Python 3.11 or newer, this is {sys.version.split()[0]}: set PYTHON=/path/to/python3.11")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"Treadle needs a Python with venv ({error}): apt-get install python3-venv")
PY
