"""The whole build of one target: plan, compile what the cache lacks, link, describe, sign, verify, put in place."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernseal.abi import library
from kernseal.abi.library import VariantRecord
from kernseal.abi.pins import pins_header, pins_rust
from kernseal.export import (
    evidence,
    files,
    git,
    host,
    inputs,
    licences,
    manifest,
    patch,
    paths,
    ptx,
    run,
    sbom,
    signing,
    source,
    toolchain,
)
from kernseal.export import variant as variants
from kernseal.export.compilers import Compilers
from kernseal.export.front_end import Tools, host_prefix
from kernseal.export.inputs import VariantInputs
from kernseal.export.model import Model
from kernseal.export.progress import Reporter, Silent
from kernseal.export.spec import Op, Target, Variant
from kernseal.export.variant import Built
from kernseal.loader.envelope import FILE as ENVELOPE
from kernseal.loader.errors import InvalidArgument, KernsealError, Unsupported
from kernseal.loader.policy import Policy
from kernseal.loader.statement import FILE as MANIFEST
from kernseal.loader.verify import VerifiedBundle, verify_bundle

SCHEDULER = re.compile(r"(?:tcp|tls|wss?)://(?:[^\s:/\[\]]+|\[[0-9a-fA-F:.%]+\]):\d{1,5}")


@dataclass(frozen=True)
class Options:
    """What the caller of a build may choose.

    Attributes:
        profile: of ``kernel.yaml``.
        only: variant ids or ``op/variant``, of the profile or not; when empty, all of the profile or of the model.
        jobs: variants compiled at once (about 1 GB of memory each).
        source: a wheel, unpacked wheel or checkout instead of the pinned wheel; must hash the same.
        rules: folder of PTX rules.
        use_cache: False compiles every variant again.
        out: folder in which the bundle's folder is put.
        model: whose variants to build, instead of those of the profile.
        scheduler: address of a dask.distributed cluster that compiles, instead of this machine.

    Raises:
        InvalidArgument: ``scheduler`` is no address. That nobody answers there shows when something is to be compiled.
    """

    profile: str = "default"
    only: tuple[str, ...] = ()
    jobs: int = 1
    source: Path | None = None
    rules: Path | None = None
    use_cache: bool = True
    out: Path = Path("dist")
    model: Model | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.scheduler is not None and not SCHEDULER.fullmatch(self.scheduler):
            raise InvalidArgument(
                f"--scheduler {self.scheduler!r}: not an address; supported is PROTOCOL://HOST:PORT with tcp, tls, ws or"
                " wss, such as tcp://farm:8786"
            )

    @property
    def choice(self) -> str:
        """What the manifest calls the choice of variants, which it lists: two configs that need the same make one bundle."""
        return self.profile if self.model is None else "model"

    def variants(self, op: Op, target: Target) -> list[Variant]:
        """Those of ``op`` that are to be built, before ``only``."""
        if self.model is not None:
            return self.model.variants(op, target)
        return op.variants(target, self.profile)

    def left_out(self, ops: Sequence[Op], target: Target) -> list[str]:
        """For each op of which the model gets nothing, why; nothing is left out of a profile."""
        return [] if self.model is None else self.model.left_out(ops, target)


@dataclass(frozen=True)
class Planned:
    """One variant and everything that decides its bytes."""

    op: Op
    variant: Variant
    inputs: VariantInputs


@dataclass(frozen=True)
class Plan:
    """One target's build before anything is compiled."""

    target: Target
    planned: tuple[Planned, ...]
    rules: tuple[ptx.PtxRule, ...]
    patches: Mapping[str, tuple[patch.SourcePatch, ...]] = field(hash=False)
    tools: tuple[toolchain.Tool, ...] = ()


@dataclass(frozen=True)
class Result:
    """A bundle that is in place.

    Attributes:
        fresh: False when it was already there and nothing had changed.
        statement: of its manifest.
        trusted_by: what vouches for it here: the committed pins, the key it was signed with.
    """

    target: Target
    path: Path
    fresh: bool
    statement: Mapping[str, Any]
    trusted_by: tuple[str, ...]
    signed_by: str


def plan(ops: Sequence[Op], target: Target, options: Options) -> Plan:
    """What a build of ``target`` consists of.

    Raises:
        InvalidArgument: ``only`` names a variant that no op has.
        Unsupported: ``only`` names one that the target cannot have, or an op cannot serve the model; the message says why.
        ToolchainInvalid, RuleFailed: an input is not as pinned.
    """
    rules = tuple(ptx.load(options.rules or paths.patches() / "ptx"))
    tools = tuple(toolchain.inspect_toolchain())
    pins = {tool.name: tool.pin for tool in tools}
    patches = {op.name: tuple(patch.load(paths.patches(), op.data["patches"])) for op in ops}
    sets = {op.name: source.source_set(op.folder) for op in ops}
    planned = []
    for op, variant in _wanted(ops, target, options):
        made = inputs.of_variant(op, variant, target, sets[op.name], patches[op.name], rules, pins)
        planned.append(Planned(op, variant, made))
    return Plan(target, tuple(planned), rules, patches, tools)


def _wanted(ops: Sequence[Op], target: Target, options: Options) -> list[tuple[Op, Variant]]:
    if not options.only:
        return [(op, variant) for op in ops for variant in options.variants(op, target)]
    found: dict[str, tuple[Op, Variant]] = {}
    for name in options.only:
        op, variant = _named(ops, target, name, options)
        found[variant.key] = op, variant
    return list(found.values())


def _named(ops: Sequence[Op], target: Target, name: str, options: Options) -> tuple[Op, Variant]:
    wanted, _, variant_id = name.rpartition("/")
    for op in ops:
        variant = op.named(target, variant_id) if wanted in ("", op.name) else None
        if variant is not None:
            return op, variant
    known = "\n  ".join(variant.key for op in ops for variant in options.variants(op, target))
    raise InvalidArgument(f"variant {name!r}: no op has it; profile {options.choice!r} has\n  {known}")


def compile_all(made: Plan, options: Options, report: Reporter) -> dict[str, Built]:
    """Every variant of the plan, from the cache or compiled now.

    Raises:
        SourceInvalid, RuleFailed, BuildFailed: naming the variant.
    """
    built: dict[str, Built] = {}
    missing = []
    for item in made.planned:
        found = variants.cached(item.inputs.key) if options.use_cache else None
        if found is None:
            missing.append(item)
        else:
            built[item.variant.key] = found
    if missing:
        built.update(_compile(made, missing, options, report))
    return built


def _compile(made: Plan, missing: Sequence[Planned], options: Options, report: Reporter) -> dict[str, Built]:
    opened, _ = source.open_source(options.source, source.upstream(), report.note)
    trees = {
        op.name: patch.apply(source.read_set(opened, source.source_set(op.folder)), made.patches[op.name])
        for op in {item.op.name: item.op for item in missing}.values()
    }
    missing = _longest_first(missing, trees)
    if options.scheduler is None:
        return _compile_here(made, missing, trees, options, report)
    from kernseal.export import farm

    return farm.compile_all(options.scheduler, made.target, missing, trees, report)


def _longest_first(missing: Sequence[Planned], trees: Mapping[str, Mapping[str, bytes]]) -> list[Planned]:
    """The order to compile in: a long one that comes last is waited for by all other workers.

    Before anything is compiled only this is known: CuTe DSL takes many times as long as NVRTC, and for an op with more
    source longer.
    """

    def length(item: Planned) -> tuple[bool, int]:
        front_end = item.op.data["classes"][item.variant.class_name]["front_end"]
        return front_end == "cute", sum(map(len, trees[item.op.name].values()))

    return sorted(missing, key=length, reverse=True)


def _compile_here(
    made: Plan,
    missing: Sequence[Planned],
    trees: Mapping[str, Mapping[str, bytes]],
    options: Options,
    report: Reporter,
) -> dict[str, Built]:
    compilers = Compilers(cute=toolchain.dsl_runtime_path(), nvrtc=toolchain.nvrtc_path())
    tools = Tools(toolchain.ptxas_path(), compilers, toolchain.cuda_headers())
    built: dict[str, Built] = {}
    with (
        compilers,
        tempfile.TemporaryDirectory(prefix="kernseal-source-") as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        folders = {op: Path(name) / op for op in trees}
        for op, folder in folders.items():
            patch.write_tree(folder, trees[op])
        waiting = {
            pool.submit(
                variants.build, p.op, p.variant, made.target, p.inputs, folders[p.op.name], made.rules, tools
            ): p
            for p in missing
        }
        try:
            with report.steps(f"compile {made.target.name}", len(missing)) as step:
                for future in as_completed(waiting):
                    built[waiting[future].variant.key] = future.result()
                    step(waiting[future].variant.key)
        except BaseException:
            run.stop_all()
            pool.shutdown(wait=True, cancel_futures=True)
            run.allow()
            raise
    return built


def records(made: Plan, built: Mapping[str, Built]) -> list[VariantRecord]:
    """The variants as the library's tables need them, in order of op and id."""
    return [
        _record(made.target, item, built[item.variant.key])
        for item in sorted(made.planned, key=lambda p: p.variant.key)
    ]


def _record(target: Target, item: Planned, built: Built) -> VariantRecord:
    return VariantRecord(
        op=item.op.name,
        variant=item.variant.id,
        class_name=item.variant.class_name,
        axes=dict(item.variant.axes),
        kernels=built.kernels,
        file=f"cubin/{item.variant.key}.cubin",
        size=(built.folder / "kernel.cubin").stat().st_size,
        sha256=built.sha256["kernel.cubin"],
        evidence=evidence.of(item.op, item.variant.class_name, target),
        host_prefix=host_prefix(item.variant) if built.host_function else None,
        host_function=built.host_function,
    )


def contents(made: Plan, built: Mapping[str, Built], options: Options) -> dict[str, bytes]:
    """Every file of the bundle but the manifest and its envelope, by path.

    Raises:
        BuildFailed: the library does not link.
    """
    found: dict[str, bytes] = dict(licences.collect(options.source))
    for item in made.planned:
        mine = built[item.variant.key]
        found[f"cubin/{item.variant.key}.cubin"] = mine.read("kernel.cubin")
        found[f"ptx/{item.variant.key}.ptx"] = mine.read("kernel.ptx")
        if mine.sha256["raw.ptx"] != mine.sha256["kernel.ptx"]:
            found[f"ptx/{item.variant.key}.raw.ptx"] = mine.read("raw.ptx")
    objects = {
        item.variant.key: built[item.variant.key].read("host.o")
        for item in made.planned
        if built[item.variant.key].host_function
    }
    with tempfile.TemporaryDirectory(prefix="kernseal-link-") as name:
        found[host.NAME] = host.link(
            toolchain.zig_argv(), made.target, records(made, built), objects, Path(name)
        )
    found |= {name: path.read_bytes() for name, path in library.interface_files().items()}
    found[sbom.FILE] = _sbom(made)
    hashes = {name: files.sha256_bytes(data) for name, data in found.items()}
    found["kernseal_pins.h"] = pins_header(made.target.arch, hashes).encode()
    found["kernseal_pins.rs"] = pins_rust(made.target.arch, hashes).encode()
    return found


def _sbom(made: Plan) -> bytes:
    used = sorted({item.op.name for item in made.planned})
    patches = [item for name in used for item in made.patches[name]]
    return sbom.compose(made.target, source.upstream(), toolchain.load_pins(), patches, made.rules)


def describe(
    made: Plan,
    built: Mapping[str, Built],
    hashes: Mapping[str, str],
    options: Options,
    revision: git.Revision,
) -> bytes:
    """The bundle's statement."""
    by_key = {item.variant.key: item for item in made.planned}
    kernels = []
    for record in records(made, built):
        key = f"{record.op}/{record.variant}"
        kernels.append(
            manifest.kernel_record(
                record, built[key].code_sha256, by_key[key].inputs.summary(), built[key].rules
            )
        )
    used = {item.op.name: item.op for item in made.planned}
    semantics = {name: op.data["semantics"] for name, op in sorted(used.items())}
    return manifest.statement(
        made.target, options.choice, hashes, kernels, semantics, _dependencies(made, used), revision
    )


def _dependencies(made: Plan, used: Mapping[str, Op]) -> list[dict[str, Any]]:
    """Source, source sets, patches, rules and tools as resource descriptors."""
    pin = source.upstream()
    found = [{"uri": pin.purl, "digest": {"sha256": pin.sha256}}]
    names: dict[str, str] = {}
    for op in used.values():
        names |= {f"{pin.purl}#{name}": digest for name, digest in source.source_set(op.folder).items()}
        names |= {f"kernseal:patches/{item.name}": item.sha256 for item in made.patches[op.name]}
    names |= {f"kernseal:patches/ptx/{rule.name}": rule.sha256 for rule in made.rules}
    found += [{"uri": uri, "digest": {"sha256": names[uri]}} for uri in sorted(names)]
    found += [_tool(tool) for tool in sorted(made.tools, key=lambda tool: tool.name)]
    return found


def _tool(tool: toolchain.Tool) -> dict[str, Any]:
    """A tool: its reviewed wheels, one of which is what ran, file for file; the same text on every Python."""
    wheels = next(pin.wheels for pin in toolchain.load_pins() if pin.name == tool.name)
    return {
        "uri": tool.purl,
        "digest": {"sha256": tool.pin},
        "annotations": {"role": tool.role, "wheels": wheels},
    }


def build(
    ops: Sequence[Op],
    target: Target,
    options: Options,
    key: signing.SigningKey,
    report: Reporter | None = None,
) -> Result:
    """Build one bundle, or find that it is there already.

    Raises:
        KernsealError: any of the build's; nothing is left half made.
    """
    report = report or Silent()
    made = plan(ops, target, options)
    if not made.planned:
        raise _nothing(ops, target, options)
    for line in options.left_out(ops, target):
        report.note(line)
    revision = git.revision(paths.kernels().resolve().parent)
    bundle = options.out / target.folder
    identity = _identity(made, options, revision, key)
    if options.use_cache and (there := _unchanged(bundle, identity, key)):
        return _result(target, bundle, False, there, key)
    built = compile_all(made, options, report)
    report.note(f"link {host.NAME}, {len(made.planned)} variants")
    found = contents(made, built, options)
    hashes = {name: files.sha256_bytes(data) for name, data in found.items()}
    statement = describe(made, built, hashes, options, revision)
    found |= {MANIFEST: statement, ENVELOPE: signing.sign(statement, key)}
    report.note(f"sign and verify {target.folder}")
    with files.staged_folder(bundle) as stage:
        _write(stage, found)
        verified = verify_bundle(stage, policy=_policy(key), sm=target.name)
    files.write_atomic(_state(bundle), json.dumps({"identity": identity}).encode())
    return _result(target, bundle, True, verified, key)


def _nothing(ops: Sequence[Op], target: Target, options: Options) -> KernsealError:
    if options.model is not None:
        return Unsupported("; ".join(options.left_out(ops, target)))
    return InvalidArgument(f"SM {target.name}: no op has a variant for it in profile {options.profile!r}")


def _write(stage: Path, found: Mapping[str, bytes]) -> None:
    for name, data in found.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name == host.NAME else 0o644)
    for folder in [stage, *(path for path in stage.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)


def _policy(key: signing.SigningKey) -> Policy:
    """Committed pins and keys, and the key that signs: this verification is of what was just made."""
    return signing.trusting(Policy.default(), key)


def _state(bundle: Path) -> Path:
    return bundle.with_name(f".{bundle.name}.state.json")


def _identity(made: Plan, options: Options, revision: git.Revision, key: signing.SigningKey) -> str:
    """Digest of everything that decides the bundle's bytes."""
    root = paths.kernels()
    sources = {path.parent.name + "/" + path.name: files.sha256_file(path) for path in library.core_sources()}
    headers = {
        path.relative_to(folder).as_posix(): files.sha256_file(path)
        for folder in library.include_dirs()
        for path in sorted(folder.rglob("*.h"))
    }
    headers |= {name: files.sha256_file(path) for name, path in library.interface_files().items()}
    # What the manifest says beyond the variants' inputs: semantics, evidence, licences, tools.
    said = {
        path.relative_to(root).as_posix(): files.sha256_file(path) for path in sorted(root.rglob("*.yaml"))
    }
    own = {path.name: files.sha256_file(path) for path in sorted(Path(__file__).parent.glob("*.py"))}
    parts = [
        made.target.folder,
        options.choice,
        {p.variant.key: p.inputs.key for p in made.planned},
        sources,
        headers,
        said,
        own,
    ]
    return inputs.digest([*parts, revision.commit, revision.dirty, key.keyid])


def _unchanged(bundle: Path, identity: str, key: signing.SigningKey) -> VerifiedBundle | None:
    """The bundle in place, if it was made from the same inputs and still verifies."""
    try:
        if json.loads(_state(bundle).read_text())["identity"] != identity:
            return None
        return verify_bundle(bundle, policy=_policy(key))
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, KernsealError):
        return None


def _result(
    target: Target, bundle: Path, fresh: bool, verified: VerifiedBundle, key: signing.SigningKey
) -> Result:
    return Result(target, bundle, fresh, verified.statement.document, verified.trusted_by, key.origin)
