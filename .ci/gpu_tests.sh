#!/usr/bin/env bash
# All GPU tests on a machine with Hopper GPUs, with programmatic dependent launch and without; a log of each run in OUT.
# Tests are independent, so they share the GPUs in as many processes as there are cores, less two (pytest-xdist), one
# package after the other: with those of all packages in the same processes a run took more than twice as long. What is
# tested is what python3 imports: PYTHONPATH of `.ci/build_offline.sh SITE`, or an environment with the wheels.
# SECONDS_EACH (600) is the most that a run may take; SGLang's tests run where SGLang is installed; PYTEST_ADDOPTS adds
# pytest's options.
#   PYTHONPATH=SITE .ci/gpu_tests.sh OUT [path of tests ...: default all packages]
set -uo pipefail
out=$(mkdir -p "${1:?usage: .ci/gpu_tests.sh OUT [path of tests ...]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
if [[ $# -eq 0 ]]; then
  set -- common/tests packages/*/tests
  python3 -c 'import sglang' 2>/dev/null && set -- "$@" integration/tests
fi
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
processes=$(($(nproc) > 3 ? $(nproc) - 2 : 1))
failed=0
for pdl in 1 0; do
  for tests in "$@"; do
    log=$out/tests-pdl$pdl-$(tr / - <<<"$tests").log
    HPC_PDL=$pdl timeout -k 5 "${SECONDS_EACH:-600}" \
      python3 -m pytest -q -m gpu -n "$processes" -p no:cacheprovider "$tests" >"$log" 2>&1
    code=$?
    [[ $code -eq 0 ]] || failed=1
    printf 'HPC_PDL=%s %s: exit status %s; %s\n' "$pdl" "$tests" "$code" "$(tail -1 "$log")"
    grep -E '^(FAILED|ERROR)' "$log" | head -20
  done
done
exit $failed
