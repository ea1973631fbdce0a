#!/usr/bin/env bash
# Regenerates what is committed of protos/, with the pinned generator: the stubs under clients/python, and the reference of every RPC.
# generate-protos.sh [OUT [REFERENCE]]: by default clients/python and docs/rpc.md; the test of drift gives temporary ones.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/clients/python}
reference=${2:-$root/docs/rpc.md}
bin=$("$root/scripts/codegen-venv.sh")
descriptors=$(mktemp)
trap 'rm -f "$descriptors"' EXIT
cd "$root/protos"
mapfile -t files < <(find treadle -name '*.proto' | LC_ALL=C sort)
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I . \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  --descriptor_set_out="$descriptors" --include_imports --include_source_info "${files[@]}"
for file in "${files[@]}"; do
  # A proto without a service leaves an empty grpc stub behind.
  grep -q '^service ' "$file" || rm -f "$out/${file%.proto}_pb2_grpc.py" "$out/${file%.proto}_pb2_grpc.pyi"
done
"$bin/python" "$root/scripts/rpc_reference.py" "$descriptors" >"$reference"
