#!/usr/bin/env bash
# Regenerates the committed stubs under clients/python from protos/, with the pinned generator in a venv of its own.
# generate-protos.sh [OUT]: OUT defaults to clients/python; the test of drift gives a temporary folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/clients/python}
venv=$root/.venv-codegen
if ! cmp -s "$root/requirements-codegen.txt" "$venv/.installed"; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check -q install -r "$root/requirements-codegen.txt"
  cp "$root/requirements-codegen.txt" "$venv/.installed"
fi
cd "$root/protos"
mapfile -t files < <(find treadle -name '*.proto' | LC_ALL=C sort)
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I . \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" "${files[@]}"
for file in "${files[@]}"; do
  folder=$(dirname "$file")
  # A proto without a service leaves an empty grpc stub behind.
  grep -q '^service ' "$file" || rm -f "$out/${file%.proto}_pb2_grpc.py" "$out/${file%.proto}_pb2_grpc.pyi"
done
