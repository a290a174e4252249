#!/usr/bin/env bash
# Everything that needs the GPU, in order: tests, compute-sanitizer, benchmark. Reports go to $OUT, or build/gpu.
# Steps can be named, each is a function run_STEP below: run_all.sh tests sanitizer_xqa. KERNSEAL_COMMIT and KERNSEAL_DIRTY=0|1 say what is
# being measured where there is no git; KERNSEAL_TRUST_KEY names a public key to trust besides the committed pins. BENCH_ARGS=--quick
# measures a part of each grid; TRITON_DECODE names the file of the Triton decode (tests/gpu/xqa_contenders.py).
set -u
cd "$(dirname "$0")/../.." || exit 2
out=${OUT:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Oracles run on the host. With a thread for each processor in every process, processes that run side by side wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
sanitizers="sanitizer sanitizer_xqa sanitizer_mla sanitizer_cp sanitizer_gdn_decode sanitizer_ragged sanitizer_paged sanitizer_mqa sanitizer_topk sanitizer_varlen sanitizer_qsa"
steps=${*:-tests $sanitizers bench bench_xqa bench_cp bench_launch}
failed=0

run_tests() {
    KERNSEAL_REPORT="$out/tests.json" "$python" -m pytest tests/gpu -q -p no:cacheprovider --durations=10 ${PYTEST_ARGS:-} \
        2>&1 | tee "$out/tests.log"
    return "${PIPESTATUS[0]}"
}

# One program under each tool of compute-sanitizer: sanitize NAME PROGRAM BUNDLE...
sanitize() {
    local name=$1 program=$2 log="$out/$1.log" tool bundle rc worst=0 sanitizer
    shift 2
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    : >"$log"
    for bundle in ${BUNDLES:-$*}; do
        for tool in ${TOOLS:-memcheck initcheck racecheck synccheck}; do
            echo "== $tool $bundle" | tee -a "$log"
            timeout "${SANITIZER_TIMEOUT:-150}" "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 \
                "$python" -m "$program" "$bundle" >"$out/$name.part" 2>&1
            rc=$?
            cat "$out/$name.part" >>"$log"
            tail -4 "$out/$name.part"
            echo "== $tool $bundle: exit $rc, ${SECONDS}s" | tee -a "$log"
            [ "$rc" = 0 ] || worst=1
        done
    done
    rm -f "$out/$name.part"
    "$python" -m gpu.sanitizer_report "$log" "$out/$name.json" || worst=1
    return $worst
}

run_sanitizer() { sanitize sanitizer gpu.sanitize sm90 sm120_on_sm90; }

run_sanitizer_xqa() { sanitize sanitizer_xqa gpu.sanitize_xqa sm90 sm120_on_sm90 sm90_more sm120_on_sm90_more; }

run_sanitizer_mla() { sanitize sanitizer_mla gpu.sanitize_xqa_mla sm120_on_sm90 sm120_on_sm90_more; }

run_sanitizer_cp() { sanitize sanitizer_cp gpu.sanitize_gdn_cp sm90 sm120_on_sm90 sm90_more sm120_on_sm90_more; }

ALL_BUNDLES="sm90 sm120_on_sm90 sm90_more sm120_on_sm90_more"

run_sanitizer_gdn_decode() { sanitize sanitizer_gdn_decode gpu.sanitize_gdn_decode $ALL_BUNDLES; }

run_sanitizer_ragged() { sanitize sanitizer_ragged gpu.sanitize_ragged_prefill $ALL_BUNDLES; }

run_sanitizer_paged() { sanitize sanitizer_paged gpu.sanitize_paged_prefill $ALL_BUNDLES; }

run_sanitizer_mqa() { sanitize sanitizer_mqa gpu.sanitize_paged_mqa sm90 sm120_on_sm90; }

run_sanitizer_qsa() { sanitize sanitizer_qsa gpu.sanitize_qsa_selected sm120_on_sm90 sm120_on_sm90_more; }

run_sanitizer_topk() { sanitize sanitizer_topk gpu.sanitize_topk_regions sm90 sm120_on_sm90; }

run_sanitizer_varlen() { sanitize sanitizer_varlen gpu.sanitize_topk_varlen sm90 sm120_on_sm90; }

run_bench_cp() {
    "$python" -m gpu.bench_gdn_prefill_cp --json "$out/bench_cp.json" ${BENCH_ARGS:-} 2>&1 | tee "$out/bench_cp.log"
    return "${PIPESTATUS[0]}"
}

# NATIVE is what the program launch of build_programs.sh printed.
run_bench_launch() {
    "$python" -m gpu.bench_launch --json "$out/bench_launch.json" ${NATIVE:+--native "$NATIVE"} ${BENCH_ARGS:-} 2>&1 |
        tee "$out/bench_launch.log"
    return "${PIPESTATUS[0]}"
}

run_bench_xqa() {
    "$python" -m gpu.bench_xqa_decode --json "$out/bench_xqa.json" --document "$out/charts_xqa.json" \
        ${TRITON_DECODE:+--triton-decode "$TRITON_DECODE"} ${BENCH_ARGS:-} 2>&1 | tee "$out/bench_xqa.log"
    return "${PIPESTATUS[0]}"
}

# Not among the steps that run unasked: it takes FlashInfer and fla-core (docs/runtimes.md), and many minutes. PROGRAMS is what
# build_programs.sh made.
run_bench_cold() {
    "$python" -m gpu.bench_cold --json "$out/bench_cold.json" --document "$out/bench_cold.document.json" \
        ${PROGRAMS:+--programs "$PROGRAMS"} ${BENCH_ARGS:-} 2>&1 | tee "$out/bench_cold.log"
    return "${PIPESTATUS[0]}"
}

run_bench() {
    "$python" -m gpu.bench_gdn_prefill --json "$out/bench.json" --document "$out/charts_gdn.json" ${BENCH_ARGS:-} \
        2>&1 | tee "$out/bench.log"
    return "${PIPESTATUS[0]}"
}

for step in $steps; do
    echo "#### $step"
    "run_$step" || { failed=1; echo "#### $step FAILED"; }
done
exit $failed
