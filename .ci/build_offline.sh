#!/usr/bin/env bash
# Builds every extension with what is installed here (nvcc, CMake, ninja, nanobind; nothing is downloaded) and lays the
# packages out in one folder: for a GPU machine that reaches no package index, and for tuning loops on it.
#   .ci/build_offline.sh OUT && PYTHONPATH=OUT python3 -m pytest -m gpu
set -euo pipefail
out=$(mkdir -p "${1:?usage: .ci/build_offline.sh OUT}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=${HPC_BUILD_DIR:-build/offline}
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')"
cmake --build "$build"
for project in common packages/* integration tools; do
  module=$(basename "$project"/src/*)
  cp -r "$project/src/$module" "$out/"
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$project/pyproject.toml")
  metadata=$out/$module-$version.dist-info
  mkdir -p "$metadata"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "${module//_/-}" "$version" >"$metadata/METADATA"
  $python - "$project/pyproject.toml" >"$metadata/entry_points.txt" <<'EOF'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
for group, names in groups.items():
    print(f"[{group}]", *(f"{name} = {place}" for name, place in names.items()), sep="\n")
EOF
done
find "$build" -name '*.so' -path '*/csrc/*' | while read -r extension; do
  cp "$extension" "$out/$(basename "$(dirname "$extension")")/"
done
ls "$out"/*/*.so
