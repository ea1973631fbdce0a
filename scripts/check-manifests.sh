#!/usr/bin/env bash
# Compose files against the compose-spec schema, Kubernetes manifests against the API schemas, Prometheus' configuration and the tests of
# the alerts by promtool. check-manifests.sh BIN
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
if command -v promtool >/dev/null; then
  promtool check config observability/prometheus.yml
  promtool test rules observability/rules/treadle.test.yml
else
  echo "skipped -- observability/: promtool is not installed (in Debian's package prometheus)"
fi
