#!/usr/bin/env bash
# Builds what the GPU programs need, for a machine with an SM 9.0 and no compilers: pack.sh OUT. Needs `make env`; a good quarter of
# an hour on two processors with an empty cache.
#
#   OUT/dist             the products, which the committed pins cover
#   OUT/dist/validation  variants that no pins cover, signed with a key made for them, whose public half is OUT/key.json
#   OUT/programs         what build_programs.sh makes
#   OUT/suite            with FLASHINFER_TESTS=FOLDER (docs/flashinfer.md): the variants that one in SUITE_EVERY (37) of those tests asks for
#   OUT/*.tar.xz         the same, an archive each; KERNSEAL_PACK=0 leaves them out
#
# There: KERNSEAL_DIST=OUT/dist KERNSEAL_VALIDATION_KEY=OUT/key.json tests/gpu/run_all.sh
#        KERNSEAL_DIST=OUT/suite KERNSEAL_TRUST_KEY=OUT/key.json python -m gpu.flashinfer_suite FOLDER --every 37 --ignore-qk-norm
set -euo pipefail
refuse() {
    echo "pack: $1; usage: pack.sh OUT" >&2
    exit 2
}
[ $# = 1 ] || refuse "$# arguments"
[ -n "$1" ] || refuse "OUT '': empty"
[ -z "${FLASHINFER_TESTS:-}" ] || [ -d "$FLASHINFER_TESTS" ] || refuse "FLASHINFER_TESTS '$FLASHINFER_TESTS': not a folder"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python} kernseal=${KERNSEAL:-$root/.venv/bin/kernseal}
mkdir -p -- "$1"
out=$(cd "$1" && pwd)
key=$out/key
[ -e "$key" ] || "$kernseal" keygen "$key"
[ -e "$out/key.json" ] || { echo "pack: $out/key.json is not there; remove $key" >&2; exit 1; }

"$kernseal" build --sm 90 --out "$out/dist"
"$kernseal" build --sm 120 --retarget 90 --out "$out/dist"
validation=(--key "$key" --out "$out/dist/validation")
"$kernseal" build --sm 90 --profile validation "${validation[@]}"
"$kernseal" build --sm 120 --retarget 90 --profile validation "${validation[@]}"
metadata=()
while read -r variant; do
    metadata+=(--variant "$variant")
done < <("$kernseal" list --sm 100 --json | "$python" -c 'import json, sys
for row in json.load(sys.stdin):
    if row["op"] == "qsa_metadata":
        print(row["op"] + "/" + row["variant"])')
"$kernseal" build --sm 100 --retarget 90 "${metadata[@]}" "${validation[@]}"
"$here/build_programs.sh" "$out/dist/sm_90a-linux-x86_64" "$out/programs"

# suite SM OPTION...: a bundle of what FlashInfer's tests ask for on it.
suite() {
    local sm=$1 asked=()
    shift
    while read -r variant; do asked+=(--variant "$variant"); done < <(cd "$root" && PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" -m gpu.flashinfer_suite "$FLASHINFER_TESTS" --collect-variants "sm_${sm}a" --every "${SUITE_EVERY:-37}" --ignore-qk-norm |
        sed -n '$s/--variant //gp' | tr ' ' '\n')
    "$kernseal" build --sm "$sm" --key "$key" --out "$out/suite" "${asked[@]}" "$@"
}
if [ -n "${FLASHINFER_TESTS:-}" ]; then
    suite 90
    suite 120 --retarget 90
fi

[ "${KERNSEAL_PACK:-1}" = 1 ] || exit 0
cd "$out"
for part in dist/*/ dist/validation/*/ $([ ! -d suite ] || echo suite/) programs/; do
    part=${part%/}
    [ "$part" = dist/validation ] || tar -cJf "$(tr / - <<<"${part#dist/}").tar.xz" "$part"
done
ls -l ./*.tar.xz
