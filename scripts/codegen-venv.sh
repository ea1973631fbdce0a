#!/usr/bin/env bash
# Makes the venv of the pinned tools for protos/ (requirements-codegen.txt) where it is missing or older, and prints its bin folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv-codegen
exec 9<"$root/requirements-codegen.txt" # two tests at a time may want the venv
flock 9
if ! cmp -s "$root/requirements-codegen.txt" "$venv/.installed"; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check -q install -r "$root/requirements-codegen.txt" >&2
  cp "$root/requirements-codegen.txt" "$venv/.installed"
fi
echo "$venv/bin"
