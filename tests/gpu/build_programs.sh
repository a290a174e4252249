#!/usr/bin/env bash
# Builds what run_examples.sh runs: build_programs.sh BUNDLE OUT. Needs the environment of `make env` and, for Rust, cargo.
# The programs pin BUNDLE's library and need glibc 2.17, nothing else: they can be carried to a machine without compilers.
set -euo pipefail
refuse() {
    echo "build_programs: $1; usage: build_programs.sh BUNDLE OUT" >&2
    exit 2
}
[ $# = 2 ] || refuse "$# arguments"
[ -f "$1/libkernseal.so" ] || refuse "BUNDLE '$1': not the folder of a bundle"
[ -n "$2" ] || refuse "OUT '': empty"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
bundle=$(cd "$1" && pwd)
mkdir -p -- "$2"
out=$(cd "$2" && pwd)
python=${PYTHON:-$root/.venv/bin/python}
target=(-target "$(uname -m)-linux-gnu.2.17" -mcpu=baseline)

for op in gdn_prefill xqa_decode; do
    "$python" -m ziglang c++ "${target[@]}" -std=c++17 -O2 -s "-I$bundle" "$root/abi/examples/cpp/$op.cpp" -ldl -o "$out/cpp-$op"
done
for program in stress devices launch cold; do
    "$python" -m ziglang c++ "${target[@]}" -std=c++17 -O2 -s "-I$bundle" "$here/native/$program.cpp" -ldl -lpthread -o "$out/$program"
done
"$python" -m ziglang cc "${target[@]}" -std=c11 -O2 -s "-I$bundle" "$root/abi/examples/c/gdn_prefill.c" \
    "-L$bundle" -lkernseal -ldl -lm -o "$out/c-gdn_prefill"

if command -v cargo >/dev/null; then
    # rustc asks for gcc's unwinder, which Zig has under another name.
    cat >"$out/linker" <<END
#!/usr/bin/env bash
exec "$python" -m ziglang cc ${target[*]} "\${@/#-lgcc_s/-lunwind}"
END
    chmod +x "$out/linker"
    (cd "$root/abi/rust" && KERNSEAL_BUNDLE=$bundle CARGO_TARGET_DIR=$out/rust RUSTFLAGS="-C linker=$out/linker" \
        cargo build --quiet --release --offline --locked --examples)
    for op in gdn_prefill xqa_decode; do mv "$out/rust/release/examples/$op" "$out/rust-$op"; done
    rm -r -- "$out/rust" "$out/linker"
else
    echo "build_programs: no cargo here: the Rust examples are left out" >&2
fi
