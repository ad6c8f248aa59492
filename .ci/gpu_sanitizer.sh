#!/usr/bin/env bash
# Small calls of every kernel (tests/sanitizer) under compute-sanitizer's tools, several processes at once; logs in OUT, then
# a table of what each tool saw. What is not an error though a tool says so is in tests/sanitizer/summary.py.
# PROCESSES (8) share the GPU, whose time they take by turns: all tools together take some 150 s of one H200. SECONDS_ALL
# (600) is the most that they may take, and the table says what is left then.
#   .ci/gpu_sanitizer.sh SITE OUT [memcheck initcheck synccheck racecheck]
set -uo pipefail
site=$(cd "${1:?usage: .ci/gpu_sanitizer.sh SITE OUT [TOOL ...]}" && pwd)
out=$(mkdir -p "${2:?usage: .ci/gpu_sanitizer.sh SITE OUT [TOOL ...]}" && cd "$2" && pwd)
shift 2
[[ $# -gt 0 ]] || set -- memcheck initcheck synccheck racecheck
cd "$(dirname "$0")/../tests/sanitizer"
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 site out end=$(($(date +%s) + ${SECONDS_ALL:-600}))
for package in attention moe router; do python3 run.py "$site" $package >"$out/base.$package.0.txt" 2>&1 & done
wait
watch() { # tool package part parts options
  local tool=$1 package=$2 part=$3 parts=$4 left=$((end - $(date +%s)))
  shift 4
  ((left > 5)) || return 0
  timeout -k 1 $left compute-sanitizer --tool "$tool" --print-limit 20000 --show-backtrace no \
    --log-file "$out/$tool.$package.$part.log" python3 run.py "$site" "$package" --part "$part/$parts" "$@" \
    >"$out/$tool.$package.$part.txt" 2>&1
}
export -f watch
for tool in "$@"; do
  for package in moe router attention; do
    parts=1 options=
    [[ $package == moe ]] && parts=2
    [[ $tool == racecheck ]] && parts=4 options=--small
    [[ $tool == synccheck && $package == router ]] && options=--one-consumer
    for ((part = 0; part < parts; ++part)); do echo "$tool $package $part $parts $options"; done
  done
done | xargs -P "${PROCESSES:-8}" -I{} bash -c 'watch {}'
python3 summary.py "$out" "$@"
