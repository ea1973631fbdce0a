#!/usr/bin/env bash
# Writes the hashes of the packages that images install, in the versions that were tested (requirements-mesh.txt, the engine's
# constraints.txt): of all their files, so for every platform. And the digest of SGLang's image, where a registry answers.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=services/sidecar/engine
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"${PYTHON:-python3}" -m venv "$made/venv"
"$made/venv/bin/python" -m pip --disable-pip-version-check -q install uv==0.13.9

lock() { # ARGUMENTS OUTPUT
  local output=${!#}
  "$made/venv/bin/uv" pip compile -q --generate-hashes --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
    --python-platform x86_64-manylinux_2_36 "${@:1:$#-1}" -o "$made/locked" &&
    { echo "# Made by scripts/lock-images.sh."; cat "$made/locked"; } >"$output"
}

# Of all services' extras, and what builds the wheels of this tree.
"${PYTHON:-python3}" - >"$made/mesh.in" <<'PY'
import tomllib
from pathlib import Path

services = ["predictor", "scheduler", "placement", "migrator", "tools", "rollout", "gateway", "sidecar", "console"]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = tomllib.loads(Path("clients/python/pyproject.toml").read_text())["project"]["dependencies"]
wanted += project["dependencies"] + [each for name in services for each in project["optional-dependencies"][name]]
print("\n".join(["setuptools", *(each for each in wanted if not each.startswith("treadle-client"))]))
PY
lock -c requirements-mesh.txt "$made/mesh.in" requirements-images.txt
{ grep -vE '^torch(vision)?==' $engine/constraints.txt; echo setuptools; } >"$made/engine.in"
lock --no-deps "$made/engine.in" $engine/images.txt
# PyTorch's own index has its builds for CPUs.
grep -E '^torch(vision)?==' $engine/constraints.txt >"$made/torch.in"
lock --no-deps --index-url "${TREADLE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$made/torch.in" $engine/torch.txt ||
  echo "$engine/torch.txt stays as it is: PyTorch's index does not answer"

sglang=lmsysorg/sglang:v$(sed -n 's/^sglang==//p' $engine/constraints.txt)
if digest=$(docker buildx imagetools inspect "$sglang" --format '{{.Manifest.Digest}}' 2>/dev/null); then
  sed -i -E "s|lmsysorg/sglang:v[0-9.]+(@sha256:[0-9a-f]+)?|$sglang@$digest|" compose.gpu.yml k8s/components/gpu/gpu/gpu.yaml
else
  echo "$sglang stays named by its tag: no registry answers (docker buildx imagetools)"
fi
