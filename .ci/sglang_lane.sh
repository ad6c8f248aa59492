#!/usr/bin/env bash
# The oldest SGLang that hpc-sglang works with, in an environment of its own: its torch, its transformers, our wheels
# (made by .ci/isolation.sh). Import, hooks and one engine on a CPU.
#   .ci/sglang_lane.sh [VERSION]
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-0.5.17}
environment=build/sglang-$version
pins() { sed -nE "s/^    \"(($1)[^\"]*)\",\$/\1/p" pyproject.toml; }

# What the workspace leaves out, and packages that want one of those and no test needs.
mkdir -p build
{
  pins '[a-z0-9-]* ; sys_platform'
  printf "%s ; sys_platform == 'never'\n" helion scikit-learn tokenspeed-mla
} >"build/sglang-$version.overrides"
# numpy: Triton 3.6's interpreter makes no number of an array of one element in newer ones.
uv venv -q --clear "$environment"
uv pip install -q --python "$environment" --override "build/sglang-$version.overrides" \
  --exclude-newer "$(sed -n 's/^exclude-newer = "\(.*\)"/\1/p' pyproject.toml)" \
  "sglang==$version" 'numpy<2.4' $(pins 'pytest|hypothesis|dill|jsonschema') build/wheels/hpc_{common,attention,router_gemm,moe,sglang}-*.whl

"$environment/bin/python" -m hpc_sglang
# Every test of hpc-sglang, but of engines the one with pages of one token: more is not done by that CPU engine.
"$environment/bin/python" -m pytest -q -p no:cacheprovider integration/tests \
  -k 'not test_sglang_engine or (test_greedy_tokens_are_transformers and qwen3 and not moe)'
