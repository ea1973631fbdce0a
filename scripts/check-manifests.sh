#!/usr/bin/env bash
# Compose files against the compose-spec schema, Kubernetes manifests against the API schemas. check-manifests.sh BIN
set -euo pipefail
bin=${1:?usage: check-manifests.sh BIN}
cd "$(dirname "$0")/.."
"$bin/check-jsonschema" --builtin-schema vendor.compose-spec docker-compose.yml compose.*.yml
rendered=$(mktemp)
trap 'rm -f "$rendered"' EXIT
for folder in k8s/overlays/*/; do
  "$bin/kubectl" kustomize "$folder" >"$rendered"
  "$bin/kubernetes-validate" --strict --quiet "$rendered"
  echo "ok -- $folder renders and validates"
done
