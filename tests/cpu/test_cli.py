"""The command line: documented exit codes, JSON beside every table, help with an example, one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import synthetic_bundle
from builds import BOTH, PACKED, bundle
from click.testing import CliRunner

from kernseal.export import machine, output
from kernseal.export.cli import EXIT_CODES, main
from kernseal.loader.errors import KernsealError

COMMANDS = sorted(main.commands)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_the_commands_are_those_that_are_documented() -> None:
    assert (
        sorted(
            [
                "build",
                "verify-source",
                "verify-bundle",
                "gate",
                "list",
                "inspect",
                "report",
                "keygen",
                "sign",
                "doctor",
                "wheel",
                "push",
                "pull",
                "cache",
            ]
        )
        == COMMANDS
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_takes_json(command: str) -> None:
    code, text = invoke(command, "--help")
    assert code == 0
    assert f"  kernseal {command}" in text.split("Example", 1)[1]
    assert "--json" in text


def test_every_exit_code_of_an_error_is_documented() -> None:
    documented = {int(number) for number in re.findall(r"(?:^|\s)(\d+)  ", EXIT_CODES)}
    assert {error.exit_code for error in KernsealError.__subclasses__() if error.value >= 0} <= documented
    assert {0, 1, 130} <= documented


@pytest.mark.parametrize(
    ("arguments", "code", "status", "words"),
    [
        (["build", "--sm", "75"], 2, "unsupported", "supported: sm_90a"),
        (["build", "--sm", ","], 2, "invalid_argument", "comma list"),
        (["build", "--sm", "90", "--retarget", "120"], 2, "unsupported", "sm_120a-on-sm_90a"),
        (["build", "--sm", "90", "--profile", "huge"], 2, "invalid_argument", "supported: default, full"),
        (["build", "--sm", "90", "--jobs", "0"], 2, "invalid_argument", "jobs"),
        (
            ["gate", "--sm", "90", "--jobs", "many"],
            2,
            "invalid_argument",
            "'many' is not a valid number or auto",
        ),
        (["build", "--sm", "90", "--scheduler", "nowhere"], 2, "invalid_argument", "--scheduler 'nowhere'"),
        (["build", "--sm", "90", "--key", "/no/such/key"], 7, "io_error", "/no/such/key"),
        (["build"], 2, "invalid_argument", "--sm"),
        (["inspect", "/no/such/file"], 2, "invalid_argument", "/no/such/file"),
        (["gate", "--sm", "90", "--update", "--variant", PACKED], 2, "invalid_argument", "whole bundles"),
        (["verify-bundle", "/no/such/bundle", "--pins", "/no/such/pins"], 4, "missing", "/no/such"),
    ],
)
def test_a_bad_argument_is_one_typed_error(arguments: list[str], code: int, status: str, words: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kernseal.export.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(shown.stdout)
    assert (shown.returncode, report["error"], report["exit_code"]) == (code, status, code), shown
    assert words in report["message"]
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(("arguments", "jobs"), [([], 3), (["--jobs", "auto"], 3), (["--jobs", "7"], 7)])
def test_jobs_are_a_number_or_what_suits_this_machine(
    arguments: list[str], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "default_jobs", lambda: 3)
    (option,) = (param for param in main.commands["build"].params if param.name == "jobs")
    command = click.Command("some", params=[option], callback=lambda jobs: click.echo(jobs))
    assert CliRunner().invoke(command, arguments).output == f"{jobs}\n"


def test_people_get_one_line() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kernseal.export.cli", "build", "--sm", "75"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout == ""
    assert shown.stderr.startswith("kernseal: unsupported: SM 'sm_75a': supported: sm_90a")
    assert shown.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_built_bundle_is_listed_inspected_and_verified() -> None:
    path = str(bundle("90").path)
    code, listed = invoke("list", "--sm", "90", "--bundle", path, "--json")
    rows = json.loads(listed)
    assert code == 0
    assert {row["variant"] for row in rows if row["in_bundle"] == "yes"} == set(BOTH)
    assert {row["in_bundle"] for row in rows} == {"yes", "no"}
    code, inspected = invoke("inspect", path, "--json")
    assert code == 0
    assert [kernel["variant"] for kernel in json.loads(inspected)] == sorted(BOTH)
    code, cubin = invoke("inspect", f"{path}/cubin/gdn_prefill/{PACKED}.cubin", "--json")
    (entry,) = json.loads(cubin)["entries"].values()
    assert code == 0
    assert entry["registers"] > 0
    assert entry["params"][0]["offset"] == 0
    code, cubin = invoke("inspect", f"{path}/cubin/gdn_prefill/{PACKED}.cubin")
    assert " FullyFusedDeltaRuleSm90 " in cubin and entry["name"] not in cubin


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (
            "kernel_cutlass_kernel_flashinfergdn_kernelsdelta_rule_dsldelta_rule_sm90_FullyFusedDeltaRuleSm90_object_at_"
            "_None_tensorptrf32gmemalign16o1_CopyAtom_ThrID10_0",
            "FullyFusedDeltaRuleSm90",
        ),
        (
            "kernel_cutlass_kernel_flashinfergdn_kernelsdelta_rule_dsldelta_rule_cp_sm120CPDeltaRuleTPrecomputeSm120"
            "_object_at__CopyAtom_ThrID10_TVLayoutSrc1409601_1",
            "CPDeltaRuleTPrecomputeSm120",
        ),
        (
            "kernel_cutlass_kernel_kernseal_recipeGatherStates_object_at__tensorptrf32gmemalign16o128_0",
            "GatherStates",
        ),
        (
            "kernel_cutlass_single_pass_multi_cta_topk_kernel_flashinfertopk_varlenkernelsradix_topk"
            "SinglePassMultiCTARadixTopKKernel_object_at__tensorptrbf16gmemoi641__1",
            "SinglePassMultiCTARadixTopKKernel",
        ),
        (
            "kernel_cutlass_gdn_decode_bf16state_mtp_ilp4_kernel_tensorptrbf16gmemalign16o128128_None_4_8_16_tensorptrb_0",
            "gdn_decode_bf16state_mtp_ilp4_kernel",
        ),
        ("kernel_cutlass_gdn_wide_vec_kernel_t1_tensorptrbf16gmemalign16o128128i64_None_0", "gdn_wide_vec_kernel_t1"),
        (
            "kernel_cutlass_decode_gen_kernel_TensorMapswizzleTensorMapSwizzles128b_3_dtypeclass_cutlassbase_1",
            "decode_gen_kernel",
        ),
        (  # a class that is no self: an argument's
            "kernel_cutlass_decode_gen_parallel_separate_reduction_kernel_ptrbf16gmemalign16_flashinferattentionprims_ts"
            "kernelsfmha_decodedirect_sparse_metadataDirectSparseMetadataView_object_at__ptri_1",
            "decode_gen_parallel_separate_reduction_kernel",
        ),
        ("kernel_mha", "kernel_mha"),
        ("prefill_128", "prefill_128"),
    ],
)  # fmt: skip
def test_a_kernel_is_shown_by_the_name_that_its_author_gave_it(entry: str, shown: str) -> None:
    assert output.short_entry(entry) == shown


@pytest.mark.slow
def test_a_bundle_by_a_key_that_nobody_trusts_is_refused_and_by_a_trusted_one_accepted(
    tmp_path: Path,
) -> None:
    path = str(bundle("90").path)
    assert invoke("keygen", str(tmp_path / "stranger.pem"))[0] == 0
    code, text = invoke("verify-bundle", path, "--key", str(tmp_path / "stranger.json"), "--json")
    assert code == 5, text
    assert json.loads(text)["status"] == "untrusted_key"
    public = Path(path).parents[2] / "tests.json"
    code, text = invoke("verify-bundle", path, "--key", str(public), "--sm", "90", "--json")
    assert code == 0, text
    assert json.loads(text)["trusted_by"] == ["key:tests"]
    code, text = invoke("verify-bundle", path, "--key", str(public), "--sm", "120", "--json")
    assert (code, json.loads(text)["status"]) == (3, "wrong_sm")


def test_keygen_writes_a_private_key_for_its_owner_only(tmp_path: Path) -> None:
    code, text = invoke("keygen", str(tmp_path / "k.pem"), "--json")
    assert code == 0
    made = json.loads(text)
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in text
    assert json.loads(Path(made["public"]).read_text())["keyid"] == made["keyid"]
    code, _ = invoke("keygen", str(tmp_path / "k.pem"), "--json")
    assert code == 2


def test_doctor_names_every_pinned_tool() -> None:
    code, text = invoke("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(text)}
    assert code == 0, text
    assert any("ptxas" in str(check) for check in checks.values())
    assert any("ziglang" in str(check) for check in checks.values())


@pytest.mark.parametrize(
    ("options", "code", "status"),
    [
        ([], 0, "ok"),
        (["--min-version", "1.2.3"], 0, "ok"),
        (["--both"], 5, "untrusted_key"),
        (["--min-version", "1.2.4"], 4, "mismatch"),
        (["--manifest-sha256", "0" * 64], 4, "mismatch"),
        (["--min-version", "new"], 2, "invalid_argument"),
        (["--manifest-sha256", "0"], 2, "invalid_argument"),
        (["--threshold", "2"], 2, "invalid_argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_verify_bundle_takes_every_part_of_a_policy(
    options: list[str], code: int, status: str, tmp_path: Path
) -> None:
    bundle = synthetic_bundle.make(tmp_path / "bundle")
    lock = tmp_path / "sm_90a.lock.json"
    lock.write_text(json.dumps(bundle.pins))
    command = ["verify-bundle", str(bundle.path), "--pins", str(lock), *options, "--json"]
    shown = subprocess.run(
        [sys.executable, "-m", "kernseal.export.cli", *command], capture_output=True, text=True, check=False
    )
    report = json.loads(shown.stdout)
    assert (shown.returncode, report.get("error", report.get("status"))) == (code, status), shown


def test_verify_bundle_says_which_files_it_counts(tmp_path: Path) -> None:
    bundle = synthetic_bundle.make(tmp_path / "bundle")
    lock = tmp_path / "sm_90a.lock.json"
    lock.write_text(json.dumps(bundle.pins))
    code, text = invoke("verify-bundle", str(bundle.path), "--pins", str(lock))
    assert code == 0
    assert f"the {len(bundle.contents)} files that its manifest names" in text
