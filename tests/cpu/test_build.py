"""The build: what is patched is what is assembled and shipped; nothing is ever half there."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builds import BOTH, CACHE, PACKED, ROOT, XQA, bundle, compile_cache, signing_key

from kernseal.export import build, elf, files, git, paths, spec
from kernseal.export import variant as variants
from kernseal.export.build import Options
from kernseal.export.progress import Silent
from kernseal.loader.errors import BuildFailed, InvalidArgument, RuleFailed, Unsupported

OPS = spec.load_ops()
SM90 = spec.parse_target("90", None, OPS)
MARKER = 0x5EA15EA1
MARKER_RULE = f"""
name: marker
reason: a test plants this
upstream: none
remove_when: never
sms: [sm_90a]
ops: all
pattern: '^\\.address_size 64$'
replacement: '.address_size 64\\n\\n.visible .global .align 4 .u32 kseal_marker = {MARKER};'
expect: 1
"""


def rules_with_marker(folder: Path, expect: int = 1) -> Path:
    folder.mkdir()
    text = MARKER_RULE.replace("'^\\.", "'(?m)^\\.").replace("expect: 1", f"expect: {expect}")
    (folder / "marker.yaml").write_text(text)
    return folder


@pytest.mark.slow
def test_the_patched_ptx_is_what_is_assembled_and_the_assembled_image_is_what_the_library_loads(
    tmp_path: Path,
) -> None:
    options = Options(only=(PACKED,), rules=rules_with_marker(tmp_path / "rules"), out=tmp_path / "dist")
    with compile_cache():
        result = build.build(OPS, SM90, options, signing_key())
    name = f"gdn_prefill/{PACKED}"
    patched = (result.path / f"ptx/{name}.ptx").read_text()
    raw = (result.path / f"ptx/{name}.raw.ptx").read_text()
    image = (result.path / f"cubin/{name}.cubin").read_bytes()
    library = (result.path / "libkernseal.so").read_bytes()
    assert "kseal_marker" in patched
    assert "kseal_marker" not in raw
    assert patched.replace(f"\n\n.visible .global .align 4 .u32 kseal_marker = {MARKER};", "") == raw
    assert MARKER.to_bytes(4, "little") in image
    assert b"kseal_marker" in image
    assert files.sha256_bytes(image).encode() in library, "the library checks for this very image"
    (kernel,) = result.statement["predicate"]["buildDefinition"]["internalParameters"]["kernels"]
    assert kernel["ptx_rules"] == {"marker": 1}


def test_the_variants_that_take_long_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "gdn_decode/t1_narrow_v16_i32_norm",
        f"gdn_prefill/{PACKED}",
        "gdn_prefill_cp/bf16_sbf16_hvk_i64_init_pooled",
        f"xqa_decode/{XQA}",
    ]
    order: list[str] = []
    monkeypatch.setattr(
        build,
        "_compile_here",
        lambda _, missing, *__: order.extend(item.variant.key for item in missing) or {},
    )
    options = Options(only=tuple(names), use_cache=False)
    with compile_cache():
        build.compile_all(build.plan(OPS, SM90, options), options, Silent())
    assert order == [names[2], names[1], names[0], names[3]]


@pytest.mark.slow
def test_a_ptx_rule_that_finds_another_count_fails_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    options = Options(
        only=(PACKED,), rules=rules_with_marker(tmp_path / "rules", expect=2), out=tmp_path / "dist"
    )
    with compile_cache(), pytest.raises(RuleFailed, match=r"expected 2 places, found 1 \(lines \d+\)"):
        build.build(OPS, SM90, options, signing_key())
    assert not (tmp_path / "dist").exists() or list((tmp_path / "dist").iterdir()) == []


@pytest.mark.slow
def test_no_image_is_left_in_the_library() -> None:
    result = bundle("90")
    library = (result.path / "libkernseal.so").read_bytes()
    image = (result.path / f"cubin/gdn_prefill/{PACKED}.cubin").read_bytes()
    assert library.count(b"\x7fELF") == 1
    assert image[64:4096] not in library


def test_a_host_object_that_prints_or_carries_an_image_is_refused() -> None:
    variant = OPS[0].variants(SM90, "default")[0]
    with compile_cache():
        result = bundle("90")
        key = next(p.inputs.key for p in build.plan(OPS, SM90, Options(only=BOTH)).planned)
        found = variants.cached(key)
    assert found is not None
    assert result.path.is_dir()
    host = found.read("host.o")
    variants._check_host(variant, host)
    with pytest.raises(BuildFailed, match="embedded image"):
        variants._check_host(variant, host + found.read("kernel.cubin"))
    with pytest.raises(BuildFailed, match="imports printf"):
        variants._check_host(variant, host.replace(b"_cudaGetDevice\0", b"printf\0" + b"\0" * 8, 1))


def test_code_that_is_not_the_dsls_own_is_noticed() -> None:
    variant = OPS[0].variants(SM90, "default")[0]
    with pytest.raises(BuildFailed, match="do not belong together"):
        variants._same_code(variant, elf.Cubin({}, "0" * 64), elf.Cubin({}, "1" * 64))


@pytest.mark.slow
def test_a_second_run_that_changes_nothing_says_so_and_touches_nothing(tmp_path: Path) -> None:
    first = bundle("90")
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    second = bundle("90")
    assert not second.fresh
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before


@pytest.mark.slow
def test_a_bundle_that_was_altered_is_built_again(tmp_path: Path) -> None:
    options = Options(only=(PACKED,), out=tmp_path / "dist")
    with compile_cache():
        first = build.build(OPS, SM90, options, signing_key())
        cubin = first.path / f"cubin/gdn_prefill/{PACKED}.cubin"
        good = cubin.read_bytes()
        cubin.write_bytes(good[:-1] + b"\0\0")
        second = build.build(OPS, SM90, options, signing_key())
    assert second.fresh
    assert cubin.read_bytes() == good


@pytest.mark.slow
def test_a_damaged_cache_entry_is_compiled_again_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle("90")
    made = build.plan(OPS, SM90, Options(only=(PACKED,)))
    key = made.planned[0].inputs.key
    source = CACHE / "variants" / key[:2] / key
    shutil.copytree(source, tmp_path / "variants" / key[:2] / key)
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path))
    assert variants.cached(key) is not None
    (tmp_path / "variants" / key[:2] / key / "kernel.cubin").write_bytes(b"other")
    assert variants.cached(key) is None
    (tmp_path / "variants" / key[:2] / key / "record.json").write_text("{")
    assert variants.cached(key) is None


def cli(*arguments: str, out: Path, **more: object) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "KERNSEAL_CACHE": str(CACHE),
        "KERNSEAL_SIGNING_KEY": (CACHE / "tests.pem").read_text(),
    }
    # A shell has what it runs in the background ignore Ctrl-C, and that is inherited.
    restore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    listening = [sys.executable, "-c", restore]
    command = [
        sys.executable,
        "-m",
        "kernseal.export.cli",
        "build",
        "--sm",
        "90",
        "--variant",
        PACKED,
        "--out",
        str(out),
    ]
    return subprocess.Popen(
        [*listening, *command, *arguments],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )  # type: ignore[call-overload,no-any-return]


def visible(out: Path) -> list[str]:
    return (
        sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) if out.exists() else []
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "TERM", "KILL"]
)
def test_an_interrupted_build_leaves_no_bundle_and_the_next_one_succeeds(
    tmp_path: Path, number: signal.Signals
) -> None:
    bundle("90")
    out = tmp_path / "dist"
    child = cli("--no-cache", out=out)
    time.sleep(3)
    assert child.poll() is None, child.communicate()
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == (-9 if number == signal.SIGKILL else 130), errors
    assert visible(out) == []
    again = cli(out=out)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert visible(out) == ["sm_90a-linux-x86_64"]


@pytest.mark.slow
def test_a_kill_between_the_two_renames_is_put_right_by_the_next_build(tmp_path: Path) -> None:
    target = tmp_path / "sm_90a-linux-x86_64"
    dead = subprocess.Popen(["true"])
    dead.wait()
    old = tmp_path / f".{target.name}.old-{files._place()}-{dead.pid}"
    partial = tmp_path / f".{target.name}.{files._place()}-{dead.pid}.x.partial"
    old.mkdir()
    (old / "whole").write_text("old bundle")
    partial.mkdir()
    with pytest.raises(RuntimeError, match="stop here"), files.staged_folder(target):
        assert (target / "whole").read_text() == "old bundle"
        raise RuntimeError("stop here")
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name]


def test_what_another_machine_has_not_finished_is_left_to_it_for_a_day(tmp_path: Path) -> None:
    """Its process numbers mean nothing here."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    young, old = (tmp_path / f".entry.{'0' * 12}-{dead.pid}.{name}.partial" for name in ("young", "old"))
    for folder in (young, old):
        folder.mkdir()
    yesterday = time.time() - files.FOREIGN_SECONDS - 10
    os.utime(old, (yesterday, yesterday))
    with files.staged_folder(tmp_path / "entry"):
        pass
    assert young.exists() and not old.exists()


def test_a_folder_with_the_same_files_is_left_to_its_readers(tmp_path: Path) -> None:
    target = tmp_path / "entry"
    for text, inode_stays in (("one", False), ("one", True), ("two", False)):
        before = target.stat().st_ino if target.exists() else None
        with files.staged_folder(target) as stage:
            (stage / "sub").mkdir()
            (stage / "sub" / "file").write_text(text)
        assert (target.stat().st_ino == before) is inode_stays
        assert (target / "sub" / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def replace_often(target: Path, text: str) -> None:
    for number in range(60):
        with files.staged_folder(target) as stage:
            (stage / "file").write_text(f"{text}{number}")


def test_many_writers_of_one_folder_all_succeed_and_it_is_always_whole_in_the_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=replace_often, args=(tmp_path / "entry", name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    assert re.fullmatch(r"[abcd]\d+", (tmp_path / "entry" / "file").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


@pytest.mark.slow
def test_a_full_disk_is_an_input_output_error_and_leaves_no_bundle(tmp_path: Path) -> None:
    bundle("90")
    out = tmp_path / "dist"
    limit = 60_000  # bytes that one file may have: less than the cubin

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    child = cli("--json", out=out, preexec_fn=small_disk)
    output, _ = child.communicate(timeout=120)
    assert child.returncode in (7, 8), output
    assert json.loads(output)["error"] in ("io_error", "build_failed")
    assert visible(out) == []


def test_other_words_in_the_manifest_are_another_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Semantics and evidence move no variant, yet the bundle in place is then not the one asked for."""
    made, revision = build.plan(OPS, SM90, Options(only=(PACKED,))), git.Revision(None, True)
    before = build._identity(made, Options(), revision, signing_key())
    copy = Path(shutil.copytree(paths.kernels(), tmp_path / "kernels"))
    monkeypatch.setattr(paths, "kernels", lambda: copy)
    assert build._identity(made, Options(), revision, signing_key()) == before
    yaml_file = copy / "gdn_prefill" / "kernel.yaml"
    yaml_file.write_text(
        yaml_file.read_text().replace("q and k are used as given", "q and k are taken as given")
    )
    assert build._identity(made, Options(), revision, signing_key()) != before


@pytest.mark.parametrize("name", ["nope", "gdn_prefill/nope", f"xqa_decode/{PACKED}", f"{PACKED}_", ""])
def test_a_variant_that_no_op_has_lists_what_the_profile_has(name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"variant '{name}': no op has it; profile 'default' has\n  gdn_decode/"
    ):
        build.plan(OPS, SM90, Options(only=(name,)))


def test_a_variant_of_no_profile_can_be_built_by_name() -> None:
    name = "xqa_decode/f16_kve4m3_oe4m3_d48_g5_p32_window"
    assert [p.variant.key for p in build.plan(OPS, SM90, Options(only=(name, name))).planned] == [name]


def test_a_variant_that_the_target_cannot_have_says_why() -> None:
    with pytest.raises(Unsupported, match="fp8_math needs SM90"):
        build.plan(
            OPS, spec.parse_target("120", None, OPS), Options(only=("bf16_kve4m3_obf16_d128_g8_p16_fp8math",))
        )


def test_an_sm_that_no_op_has_lists_those_that_are_there() -> None:
    with pytest.raises(Unsupported, match=r"SM 'sm_75a': supported: sm_90a, .*sm_120a-on-sm_90a"):
        spec.parse_target("75", None, OPS)


def test_the_sm120_class_is_never_the_sm90_product() -> None:
    gdn = next(op for op in OPS if op.name == "gdn_prefill")
    assert gdn.class_for(SM90, {}) == "sm90"
    retargeted = spec.parse_target("120", "90", OPS)
    assert gdn.class_for(retargeted, {}) == "sm120"
    assert retargeted.folder == "sm_120a-on-sm_90a-linux-x86_64"


def test_concurrent_builds_of_one_variant_agree(tmp_path: Path) -> None:
    bundle("90")
    children = [cli("--json", out=tmp_path / str(index)) for index in range(3)]
    outputs = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    manifests = {(tmp_path / str(i) / "sm_90a-linux-x86_64" / "manifest.json").read_bytes() for i in range(3)}
    assert len(manifests) == 1
