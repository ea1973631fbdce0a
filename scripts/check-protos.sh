#!/usr/bin/env bash
# Lints protos/ and finds what would break clients of the last release. check-protos.sh [--release] [PROTOS]
# --release: make these protos the last release. PROTOS: another folder than protos/, as the test has it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
release=
if [[ ${1:-} == --release ]]; then
  release=1
  shift
fi
protos=${1:-$root/protos}
buf=$("$root/scripts/codegen-venv.sh")/buf
status=0
"$buf" lint "$protos" || status=1
"$buf" breaking "$protos" --against "$protos/released.binpb" || status=1
((status == 0)) || exit 1
echo "ok -- the protos are in order and compatible with the last release"
if [[ -n $release ]]; then
  "$buf" build "$protos" --exclude-source-info --as-file-descriptor-set -o "$protos/released.binpb"
  echo "ok -- they are the last release now: commit released.binpb"
fi
