"""Opens a sealed bundle: verify, load the library from the verified bytes, prepare ops."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .errors import Capturing, InvalidArgument, Unsupported
from .library import LIBRARY_FILE, Library, load_library
from .op import Op, choose, load_spec
from .policy import Policy
from .statement import Statement
from .tensors import stream_handle
from .verify import verify_bundle


@dataclass(frozen=True)
class Variant:
    """One kernel of a bundle.

    Attributes:
        op: the op it belongs to.
        variant: its name, unique within the op.
        class_name: upstream class it was built from.
        axes: its config in words.
        entry: name of the kernel in the image.
        sm: SM the image runs on.
        file: the image, relative to the bundle.
        sha256: of the image.
        size: of the image, in bytes.
        registers: a thread.
        spill_bytes: register spills of a thread.
        static_smem: shared memory of a block, in bytes.
        dynamic_smem: shared memory of a block asked for at launch, in bytes.
        evidence: how it was checked before it shipped: ran, retargeted, glue or inspected.
    """

    op: str
    variant: str
    class_name: str
    axes: Mapping[str, str]
    entry: str
    sm: str
    file: str
    sha256: str
    size: int
    registers: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int
    evidence: str


class Bundle:
    """An open bundle. Made by ``open_bundle``; a context manager; may be shared by threads.

    Attributes:
        path: the folder.
        statement: its manifest, as far as it is vouched for.
        device: CUDA device ordinal that ``prepare`` uses unless told another; -1 is that of the current
            context.
    """

    def __init__(
        self, library: Library, path: str, statement: Statement, *, allow_validation: bool, device: int
    ) -> None:
        """Open; see ``open_bundle``."""
        self.path = path
        self.statement = statement
        self.device = device
        self._library = library
        self._lock = threading.Lock()
        self._ops: dict[tuple[str, tuple[tuple[str, Any], ...]], Op] = {}
        self._handle: Any = _open(library, path, allow_validation)

    def variants(self) -> list[Variant]:
        """Return every kernel of the bundle, in a fixed order.

        Raises:
            InvalidArgument: the bundle is closed.
        """
        handle = self._open_handle()
        count = self._library.c.kseal_variant_count(handle)
        return [_variant(self._library, handle, index) for index in range(count)]

    def evidence(self, op: str, **config: Any) -> str:
        """Return how the variant for ``config`` was checked before it shipped: ran, retargeted, glue or inspected.

        Raises:
            InvalidArgument: the bundle is closed.
            Unsupported: the bundle has no such variant.
        """
        name = load_spec(op).variant(config)
        for variant in self.variants():
            if (variant.op, variant.variant) == (op, name):
                return variant.evidence
        raise Unsupported(f"op {op}: this bundle has no variant {name}")

    def prepare(self, op: str, *, stream: object = 0, at_least: str | None = None, **config: Any) -> Op:
        """Return the op ready to run with ``config``: variant picked, verified and loaded on the device.

        The same config gives the same op again at the cost of a look-up; ops live until the bundle closes.
        ``config`` holds the fields of ``kseal_<op>_config``, enums in words (``dtype="bf16"``) and
        switches as bools. What is left out takes the defaults of the op's ``operands.py``. ``stream`` is
        one that runs will use (as in ``Op.run``): preparing is refused while it is being captured.
        ``at_least`` refuses a variant with weaker evidence (see ``evidence``): what an engine that selects by
        itself wants, while a caller who asks for a variant by hand leaves it out.

        Raises:
            InvalidArgument: a field is unknown, missing or not of its type, or the bundle is closed.
            Unsupported: no variant of this bundle does it, and the message lists what is there; or the evidence for it
                is weaker than ``at_least``.
            WrongSm: the device is not the one the bundle is for.
            Capturing: a stream is being captured.
            KernsealError: whatever else the C library says.
        """
        if at_least is not None:
            self._require_evidence(op, config, at_least)
        config.setdefault("device", self.device)
        key = (op, tuple(sorted(config.items())))
        found = self._ops.get(key)
        if found is not None:
            return found
        with self._lock:
            handle = self._open_handle()
            found = self._ops.get(key)
            if found is None:
                _refuse_torch_capture(op)
                config["stream"] = stream_handle(stream)
                found = self._ops[key] = Op(self._library, handle, op, config)
            return found

    def choose(self, op: str, sizes: Mapping[str, Any], *, sm_count: int, **config: Any) -> dict[str, Any]:
        """Return a config for ``prepare``: ``config``, defaults, and what the op's policy sets for a run of these sizes.

        Host only: nothing is prepared, no device is asked. An engine calls it for every size that it serves and prepares
        what it gets, and at each step takes what ``prepared`` has for it.

        Args:
            op: one that has a policy.
            sizes: the fields of ``kseal_<op>_args`` that say how large a run is; the others are as good as 0.
            sm_count: SMs of the device that it is for.
            config: as for ``prepare``. What the policy sets may be left out, or say what it may do, as the op describes.

        Raises:
            Unsupported: the op has no policy.
            InvalidArgument: a field is unknown, or its value is not allowed.
            KernsealError: what the C library says; see ``kseal_<op>_choose``.
        """
        self._open_handle()
        return choose(self._library, op, sizes, sm_count, config)

    def _require_evidence(self, op: str, config: dict[str, Any], at_least: str) -> None:
        strength = self._library.enum("kseal_evidence")
        if at_least not in strength:
            raise InvalidArgument(
                f"at_least is {at_least!r}; it must be {', '.join(sorted(strength, key=strength.__getitem__))}"
            )
        have = self.evidence(op, **config)
        if strength[have] < strength[at_least]:
            name = load_spec(op).variant(config)
            raise Unsupported(
                f"op {op}: the evidence for {name} is {have!r}; at least {at_least!r} was asked for"
            )

    def prepared(self, op: str, **config: Any) -> Op | None:
        """Return the op that ``prepare`` gave for this config, or None."""
        config.setdefault("device", self.device)
        return self._ops.get((op, tuple(sorted(config.items()))))

    def close(self) -> None:
        """Unload what was prepared and close the folder. Closing again does nothing.

        Every launch must have finished, and no graph that holds one may be launched again. A ``run`` in
        progress on another thread still returns as it would have.
        """
        with self._lock:
            for op in self._ops.values():
                op.let_go()
            self._ops.clear()
            self._handle = None

    def _open_handle(self) -> Any:
        handle = self._handle
        if handle is None:
            raise InvalidArgument(f"bundle {self.path} is closed")
        return handle

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_bundle(
    path: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    allow_validation: bool = False,
    device: int | None = None,
) -> Bundle:
    """Verify the bundle in the folder ``path`` and open it.

    Args:
        path: a folder such as ``dist/sm_90a-linux-x86_64``.
        policy: whom to trust; None is ``Policy.default()``, the pins and keys of the installed package.
        allow_validation: also open bundles whose kernels were built for another SM than they are meant for.
        device: CUDA device ordinal for ``prepare``; None is the device of the context that is current then.

    Raises:
        VerificationFailed: the bundle is not what the policy trusts; it carries every violation.
        NoDriver: there is no CUDA driver.
        AbiMismatch: the bundle's library has another ABI than this loader.
        KernsealError: whatever else the C library says.
    """
    verified = verify_bundle(path, policy=policy or Policy.default(), keep=(LIBRARY_FILE,))
    library = load_library(verified.read(LIBRARY_FILE))
    ordinal = -1 if device is None else device
    return Bundle(
        library, verified.path, verified.statement, allow_validation=allow_validation, device=ordinal
    )


def _refuse_torch_capture(op: str) -> None:
    """The driver does not tell of captures on non-blocking streams, which is what torch captures on; torch does."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise Capturing(f"{op}: torch is capturing a graph; prepare this variant before the capture begins")


def _open(library: Library, path: str, allow_validation: bool) -> Any:
    ffi, c = library.ffi, library.c
    folder = ffi.new("char[]", os.fsencode(path))
    record = ffi.new("kseal_open_args *")
    record.struct_size = ffi.sizeof("kseal_open_args")
    record.abi_version = c.KSEAL_ABI_VERSION
    record.flags = library.enum("kseal_open_flag")["validation"] if allow_validation else 0
    record.bundle_path = folder
    out = ffi.new("kseal_bundle **")
    library.check(c.kseal_open(record, out))
    return ffi.gc(out[0], c.kseal_close)


def _variant(library: Library, handle: Any, index: int) -> Variant:
    ffi = library.ffi
    record = ffi.new("kseal_variant_info *")
    record.struct_size = ffi.sizeof("kseal_variant_info")
    library.check(library.c.kseal_variant_at(handle, index, record))
    values: dict[str, Any] = {}
    for name, member in ffi.typeof("kseal_variant_info").fields:
        value = getattr(record, name)
        values[name] = library.text(value) if member.type.kind == "pointer" else int(value)
    del values["struct_size"]
    names = {number: name for name, number in library.enum("kseal_evidence").items()}
    values["evidence"] = names.get(values["evidence"], str(values["evidence"]))
    values["axes"] = dict(pair.split("=", 1) for pair in values["axes"].split())
    return Variant(**values)
