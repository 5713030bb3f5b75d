#!/usr/bin/env bash
# What a short slot on one GPU should measure: parity of kernels and captured steps, and every bench at a real size.
#
#     benches/gpu.sh OUT [--dry]                                            kernels and benches, under 6 minutes
#     benches/gpu.sh real OUT [--dry] [--work FOLDER] [--pack FOLDER]       a real run, under 7 (benches/real.py)
#
# These are minutes of an H200. Nothing is installed; PYTHON names the interpreter (default: .venv/bin/python where there
# is one, else python3). Every part has its own time limit in seconds, and together they end within six minutes; one that
# fails or runs out of its time is reported, the others go on, and the exit status is 1. OUT gets a .jsonl file and a .log of every part, and the pictures. --dry runs
# all parts at a toy size, on a CPU too, where they show that everything runs and nothing about speed.
set -uo pipefail

usage() { sed -n '2,5p' "$0" >&2; exit 2; }
real=
[ "${1:-}" != real ] || { real=1; shift; }
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || usage
folder=$1
shift
dry=() options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --dry) dry=(--dry) ;;
        --work|--pack) [ -n "$real" ] && [ $# -ge 2 ] || usage; mkdir -p "$2"; options+=("$1" "$(cd "$2" && pwd)"); shift ;;
        --*-s) [ -n "$real" ] && [ $# -ge 2 ] || usage; options+=("$1" "$2"); shift ;;
        *) usage ;;
    esac
    shift
done
mkdir -p "$folder" || exit 2
out=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; }
if [ ${#dry[@]} -eq 0 ]; then
    unset TRITON_INTERPRET
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "no GPU here: --dry runs every part at a toy size" >&2; exit 2; }
fi

summary=()
failed=0
deadline=340  # seconds since the start; the pictures come behind it
[ -z "$real" ] && [ ${#dry[@]} -eq 0 ] || deadline=999999  # the real run plans its own time, a CPU has no slot

# part NAME SECONDS COMMAND...: run it with its output in OUT/NAME.log, and note how it ended.
part() {
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    [ "$name" = plots ] || limit=$((limit < deadline - began ? limit : deadline - began))
    if [ "$limit" -le 0 ]; then
        failed=1
        summary+=("$(printf '%-18s %4d s  %s' "$name" 0 "not begun, the time was over")")
        return
    fi
    echo "== $name" >&2
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    local state="ok"
    [ $status -eq 124 ] || [ $status -eq 137 ] && state="cut off after ${limit} s"
    [ "$state" = ok ] && [ $status -ne 0 ] && state="failed, status $status"
    if [ "$state" != ok ]; then
        failed=1
        tail -n 5 "$out/$name.log" >&2
    fi
    summary+=("$(printf '%-18s %4d s  %s' "$name" $((SECONDS - began)) "$state")")
}

# bench NAME SECONDS MODULE ARGUMENTS...: a bench whose rows go to OUT/NAME.jsonl.
bench() {
    local name=$1 limit=$2 module=$3
    shift 3
    part "$name" "$limit" "$PYTHON" -m "benches.$module" --output "$out/$name.jsonl" "$@" ${dry[@]+"${dry[@]}"}
}

if [ -n "$real" ]; then
    # --total-s is what the run plans with; the limit is for what hangs
    part real 450 "$PYTHON" -m benches.real --out "$out" ${options[@]+"${options[@]}"} ${dry[@]+"${dry[@]}"}
else
    parity=(tests/kernels -m "not slow")
    [ ${#dry[@]} -eq 0 ] || parity=(tests/kernels/test_language.py tests/kernels/test_topk_lse.py -m "not slow")
    part parity 80 "$PYTHON" -m pytest -q -p no:cacheprovider "${parity[@]}"
    # captured graphs against the reference decoder, and the training attention's kernel; without a GPU there are none
    gpu_only=(tests/engine/test_step.py tests/test_block_mask.py -k "captured or compiled")
    [ ${#dry[@]} -ne 0 ] || part steps 55 "$PYTHON" -m pytest -q -p no:cacheprovider "${gpu_only[@]}"
    bench kernels 55 kernels
    bench head_latency_8b 55 head_latency --geometry 8b
    bench head_latency_4b 45 head_latency --geometry 4b
    bench decode 65 decode --geometry 8b
    bench train_step 45 train_step --geometry 8b
fi
part plots 15 "$PYTHON" -m benches.plots "$out"

cat "$out/plots.log"
printf '%s\n' "${summary[@]}"
exit $failed
