#!/usr/bin/env bash
# Every benchmark whose results are committed, one after the other, with nothing else on the GPU; JSON and logs in OUT.
# Peers are timed in the same rounds where they are installed. Then, on a machine with the development environment:
#   uv run .ci/take_results.py OUT
# writes the results files, tables and plots. Half of the time is the MoE's and serving's; with a second argument only
# what is named is run: attention router moe serving.
#   PYTHONPATH=SITE .ci/gpu_results.sh OUT [PART ...]
set -uo pipefail
out=$(mkdir -p "${1:?usage: .ci/gpu_results.sh OUT [PART ...]}" && cd "$1" && pwd)
shift
parts=" ${*:-attention router moe serving} "
cd "$(dirname "$0")/.."
failed=0
run() { # name, script, arguments
  local name=$1 script=$2 begin=$SECONDS
  shift 2
  (cd "$out" && python3 "$OLDPWD/$script" "$@" --json "$name.json") >"$out/$name.log" 2>&1
  local code=$?
  [[ $code -eq 0 ]] || failed=1
  printf '%s: exit status %s after %s s; %s\n' "$name" "$code" $((SECONDS - begin)) "$(tail -1 "$out/$name.log" | cut -c1-120)"
}
attention=packages/hpc-attention/benchmarks router=packages/hpc-router-gemm/benchmarks moe=packages/hpc-moe/benchmarks
if [[ $parts == *" attention "* ]]; then
  run decode $attention/decode.py
  run plan $attention/plan.py
  run sweeps $attention/decode.py --sweeps --no-peers
fi
if [[ $parts == *" router "* ]]; then
  run router $router/router.py
  run router_decode $router/router.py --decode
  run router_route $router/router.py --route
fi
if [[ $parts == *" moe "* ]]; then
  run moe $moe/moe.py --peers
  run moe_bf16_x $moe/moe.py --bf16-x --most 256
  run moe_bf16_weights $moe/moe.py --op moe-bf16 --peers --case "qwen3-30b,hy3-tp8 m=64,hy3-tp8 m=1024"
  run moe_launches $moe/launches.py
  run moe_skew $moe/skew.py
fi
if [[ $parts == *" serving "* ]]; then
  run serving integration/benchmarks/serving.py --backend hpc --backend default --together \
    --engine mem_fraction_static=0.85 --engine max_total_tokens=131072 \
    --engine 'cuda_graph_bs_decode=[1,8,16,32,64]' --engine log_level=info --repeats 3 --traces traces \
    --row 1x1K --row 8x1K --row 32x1K --row 1x32K+15x1K --row 64x1K --row azure --profile 64x1K
fi
exit $failed
