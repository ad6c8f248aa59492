#!/usr/bin/env bash
# Builds every package's Python 3.12 stable-ABI wheel and unpacks them into one folder, for a GPU machine that cannot
# build: put the folder first on PYTHONPATH there. usage: .ci/pack_site.sh OUT [PACKAGE ...] (default: all)
set -euo pipefail
out=${1:?usage: .ci/pack_site.sh OUT [PACKAGE ...]}
shift
cd "$(dirname "$0")/.."
packages=("$@")
[[ ${#packages[@]} -gt 0 ]] || packages=(hpc-common hpc-attention hpc-router-gemm hpc-moe hpc-sglang hpc-tools)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
for package in "${packages[@]}"; do
  uv build -q --wheel --python 3.12 --package "$package" -o "$wheels"
done
mkdir -p "$out"
for wheel in "$wheels"/*.whl; do
  python3 -m zipfile -e "$wheel" "$out"
done
chmod -R u+rwX "$out"
ls "$out"
