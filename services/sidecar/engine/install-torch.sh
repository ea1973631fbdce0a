#!/usr/bin/env bash
# Installs PyTorch's build for CPUs: install-torch.sh PYTHON ARGUMENTS (as of pip install)
# For x86-64 PyPI has the build for CUDA alone, whose libraries (nvidia-*, 5 GB) no CPU uses; it cannot be imported
# without them. PyTorch's own index has the other one. Where that index cannot be reached, PyPI's build works as well.
set -euo pipefail
python=${1:?usage: install-torch.sh PYTHON ARGUMENTS}
shift
index=${TREADLE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }

if ! pip install --no-deps --retries 1 --timeout 15 --index-url "$index" "$@" 2>/dev/null; then
  echo "$index does not answer: installing the build that PyPI has"
fi
# What it needs comes from PyPI, and so does PyTorch where it is not installed yet.
pip install "$@"
