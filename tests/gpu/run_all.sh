#!/usr/bin/env bash
# Everything that needs the GPU, in order: tests, compute-sanitizer, benchmark. Reports go to $OUT, or build/gpu.
# Steps can be named: run_all.sh [tests] [sanitizer] [bench]. KERNSEAL_COMMIT and KERNSEAL_DIRTY=0|1 say what is being
# measured where there is no git; KERNSEAL_TRUST_KEY names a public key to trust besides the committed pins.
set -u
cd "$(dirname "$0")/../.." || exit 2
out=${OUT:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
steps=${*:-tests sanitizer bench}
failed=0

run_tests() {
    KERNSEAL_REPORT="$out/tests.json" "$python" -m pytest tests/gpu -q -p no:cacheprovider --durations=10 ${PYTEST_ARGS:-} \
        2>&1 | tee "$out/tests.log"
    return "${PIPESTATUS[0]}"
}

run_sanitizer() {
    local tool bundle rc worst=0 sanitizer
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    : >"$out/sanitizer.log"
    for bundle in ${BUNDLES:-sm90 sm120_on_sm90}; do
        for tool in memcheck initcheck racecheck synccheck; do
            echo "== $tool $bundle" | tee -a "$out/sanitizer.log"
            timeout "${SANITIZER_TIMEOUT:-150}" "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 \
                "$python" -m gpu.sanitize "$bundle" >"$out/sanitizer.part" 2>&1
            rc=$?
            cat "$out/sanitizer.part" >>"$out/sanitizer.log"
            tail -4 "$out/sanitizer.part"
            echo "== $tool $bundle: exit $rc, ${SECONDS}s" | tee -a "$out/sanitizer.log"
            [ "$rc" = 0 ] || worst=1
        done
    done
    rm -f "$out/sanitizer.part"
    "$python" -m gpu.sanitizer_report "$out/sanitizer.log" "$out/sanitizer.json" || worst=1
    return $worst
}

run_bench() {
    "$python" -m gpu.bench_gdn_prefill --json "$out/bench.json" ${BENCH_ARGS:-} 2>&1 | tee "$out/bench.log"
    return "${PIPESTATUS[0]}"
}

for step in $steps; do
    echo "#### $step"
    "run_$step" || { failed=1; echo "#### $step FAILED"; }
done
exit $failed
