#!/usr/bin/env bash
# Packs the protos, their documentation and the examples for teams in other languages: dist/treadle-protos-VERSION.tar.gz, the same
# bytes from the same files. bundle-protos.sh [FOLDER]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/dist}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/clients/python/pyproject.toml")
name=treadle-protos-$version
mkdir -p "$folder"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir "$made/docs"
"$("$root/scripts/codegen-venv.sh")/python" "$root/scripts/rpc_reference.py" >"$made/docs/rpc.md"
tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --transform="s,^,$name/," \
  --exclude=released.binpb --exclude={node_modules,gen,agent.js,treadle-agent,__pycache__} \
  -c LICENSE protos docs/clients.md docs/training.md docs/rewards.md examples -C "$made" docs/rpc.md |
  gzip -n >"$folder/$name.tar.gz"
echo "$folder/$name.tar.gz"
