#!/usr/bin/env bash
# Each operator's wheel in a fresh environment that holds only hpc-common and torch: it imports, refuses what it must and
# runs one CPU call. Prints every wheel's size and holds it against its budget.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=build/wheels
rm -rf "$wheels"
for package in hpc-common hpc-attention hpc-router-gemm hpc-moe hpc-sglang hpc-tools; do
  uv build -q --wheel --package "$package" -o "$wheels"
done
.ci/check_wheel.py "$wheels"/*.whl

torch=$(sed -n 's/^    "\(torch==[^"]*\)",$/\1/p' pyproject.toml)
for package in hpc-attention hpc-router-gemm hpc-moe; do
  module=${package//-/_}
  environment=$(mktemp -d)
  uv venv -q "$environment"
  uv pip install -q --python "$environment" "$torch" "$wheels"/hpc_common-*.whl "$wheels/$module"-*.whl
  (cd "$environment" && bin/python - "$module") <tests/isolated_call.py
  rm -rf "$environment"
done
