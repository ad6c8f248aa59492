#!/usr/bin/env bash
# All GPU tests on a machine with Hopper GPUs, with programmatic dependent launch and without; a log of each in OUT.
# Tests are independent, so they share the GPUs in as many processes as there are cores, less two (pytest-xdist). What is
# tested is what python3 imports: PYTHONPATH of `.ci/build_offline.sh SITE`, or an environment with the wheels.
# SECONDS_EACH (600) is the most that either run may take; SGLang's tests run where SGLang is installed.
#   PYTHONPATH=SITE .ci/gpu_tests.sh OUT [pytest arguments: default all packages]
set -uo pipefail
out=$(mkdir -p "${1:?usage: .ci/gpu_tests.sh OUT [pytest arguments]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
if [[ $# -eq 0 ]]; then
  set -- common/tests packages
  python3 -c 'import sglang' 2>/dev/null && set -- "$@" integration/tests
fi
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
processes=$(($(nproc) > 3 ? $(nproc) - 2 : 1))
failed=0
for pdl in 1 0; do
  log=$out/tests-pdl$pdl.log
  HPC_PDL=$pdl timeout -k 5 "${SECONDS_EACH:-600}" \
    python3 -m pytest -q -m gpu -n "$processes" -p no:cacheprovider "$@" >"$log" 2>&1
  code=$?
  [[ $code -eq 0 ]] || failed=1
  printf 'HPC_PDL=%s: exit status %s; %s\n' "$pdl" "$code" "$(tail -1 "$log")"
  grep -E '^(FAILED|ERROR)' "$log" | head -20
done
exit $failed
