#!/usr/bin/env bash
# Regenerates the stubs under clients/python from protos/, with the pinned generator.
# generate-protos.sh [OUT]: by default clients/python; the test of drift gives a temporary folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/clients/python}
bin=$("$root/scripts/codegen-venv.sh")
cd "$root/protos"
mapfile -t files < <(find treadle -name '*.proto' | LC_ALL=C sort)
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I . \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  "${files[@]}"
for file in "${files[@]}"; do
  # A proto without a service leaves an empty grpc stub behind.
  grep -q '^service ' "$file" || rm -f "$out/${file%.proto}_pb2_grpc.py" "$out/${file%.proto}_pb2_grpc.pyi"
done
