#!/usr/bin/env bash
# Names every system package that Treadle needs and that is not here, with the command that installs it.
set -euo pipefail
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
if ((${#missing[@]})); then
  echo "Treadle needs system packages that are not installed: ${missing[*]}" >&2
  echo "  Debian, Ubuntu:  apt-get install -y ${missing[*]}" >&2
  echo "  Fedora:          dnf install -y ${missing[*]}" >&2
  exit 1
fi
python=${PYTHON:-python3}
"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Treadle needs Python 3.11 or newer, this is {sys.version.split()[0]}: set PYTHON=/path/to/python3.11")
PY
