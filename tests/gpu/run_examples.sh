#!/usr/bin/env bash
# Runs the examples and programs that build_programs.sh made against the bundle that they were made for, and checks how each ends:
# run_examples.sh PROGRAMS BUNDLE [KEY]. KEY is a public key file for Python, where the committed pins are not those of BUNDLE.
# LAUNCHES (10000) is for the stress program; SANITIZER=1 runs the C++ examples under compute-sanitizer as well.
set -u
refuse() {
    echo "run_examples: $1; usage: run_examples.sh PROGRAMS BUNDLE [KEY]" >&2
    exit 2
}
[ $# = 2 ] || [ $# = 3 ] || refuse "$# arguments"
[ -x "$1/stress" ] || refuse "PROGRAMS '$1': not a folder that build_programs.sh made"
[ -f "$2/libkernseal.so" ] || refuse "BUNDLE '$2': not the folder of a bundle"
[ -z "${3+set}" ] || [ -f "$3" ] || refuse "KEY '$3': not a file"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 2
programs=$(cd "$1" && pwd) || exit 2
bundle=$(cd "$2" && pwd) || exit 2
keys=("${@:3}")
python=${PYTHON:-python3}
failed=0
ran=0

# expect CODE TEXT COMMAND...: it ends with CODE and says TEXT.
expect() {
    local code=$1 text=$2 said rc
    shift 2
    said=$("$@" 2>&1)
    rc=$?
    ran=$((ran + 1))
    if [ "$rc" = "$code" ] && [[ $said == *"$text"* ]]; then
        echo "pass: ${*##*/}: $said"
    else
        echo "FAIL: $*: exit $rc, wanted $code and \"$text\": $said"
        failed=$((failed + 1))
    fi
}

gdn="ok: two tokens of GDN prefill, output and state as expected"
xqa="ok: two sequences of XQA decode, output as expected"
nowhere=$programs/nowhere
changed=$programs/changed
rm -rf -- "$changed"
cp -r -- "$bundle" "$changed" || exit 2
printf 'x' >>"$changed/libkernseal.so"

for language in cpp rust; do
    [ -x "$programs/$language-gdn_prefill" ] || { echo "left out: no $language programs"; continue; }
    expect 0 "$gdn" "$programs/$language-gdn_prefill" "$bundle"
    expect 0 "$xqa, also from a graph" "$programs/$language-xqa_decode" "$bundle"
    for op in gdn_prefill xqa_decode; do
        expect 1 "missing: " "$programs/$language-$op" "$nowhere"
        expect 1 "mismatch: " "$programs/$language-$op" "$changed"
    done
done
linked=(env "LD_LIBRARY_PATH=$bundle${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$programs/c-gdn_prefill")
expect 0 "$gdn" "${linked[@]}" "$bundle"
expect 1 "missing: " "${linked[@]}" "$nowhere"

examples=(gdn_prefill xqa_decode)
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "left out: the Python example with torch, which has no GPU here"
    examples=(xqa_decode)
fi
for op in "${examples[@]}"; do
    example=$root/abi/examples/python/$op.py
    [ "$op" = gdn_prefill ] && says=$gdn || says=$xqa
    expect 0 "$says" "$python" "$example" "$bundle" "${keys[@]}"
    expect 1 "mismatch: " "$python" "$example" "$changed" "${keys[@]}"
done
rm -rf -- "$changed"

expect 0 "ok: 8 threads x 4 streams x ${LAUNCHES:-10000} launches" "$programs/stress" "$bundle" "${LAUNCHES:-10000}"
devices=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || devices=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
if [ "$devices" -ge 2 ]; then
    expect 0 "ok: two devices" "$programs/devices" "$bundle"
else
    expect 77 "skipped: " "$programs/devices" "$bundle"
fi
if [ "${SANITIZER:-0}" = 1 ]; then
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    for op in gdn_prefill xqa_decode; do
        expect 0 "0 errors" "$sanitizer" --tool memcheck --error-exitcode 99 "$programs/cpp-$op" "$bundle"
    done
fi
echo "$ran ran, $failed failed"
[ "$failed" = 0 ]
