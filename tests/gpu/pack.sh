#!/usr/bin/env bash
# Builds what the GPU programs need, for a machine with an SM 9.0 and no compilers: pack.sh OUT. Needs `make env`; a good quarter of
# an hour on two processors with an empty cache.
#
#   OUT/dist             the products, which the committed pins cover
#   OUT/dist/validation  variants that no pins cover, signed with a key made for them, whose public half is OUT/key.json
#   OUT/programs         what build_programs.sh makes
#   OUT/*.tar.xz         the same, an archive each; KERNSEAL_PACK=0 leaves them out
#
# There: KERNSEAL_DIST=OUT/dist KERNSEAL_VALIDATION_KEY=OUT/key.json tests/gpu/run_all.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python} kernseal=${KERNSEAL:-$root/.venv/bin/kernseal}
mkdir -p "$1"
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

[ "${KERNSEAL_PACK:-1}" = 1 ] || exit 0
cd "$out"
for part in dist/*/ dist/validation/*/ programs/; do
    part=${part%/}
    [ "$part" = dist/validation ] || tar -cJf "$(tr / - <<<"${part#dist/}").tar.xz" "$part"
done
ls -l ./*.tar.xz
