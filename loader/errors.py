"""The one exception tree. Names and values are those of ``abi/status.yaml``.

What Python has a class for is that as well: an argument outside what is allowed is a ValueError, one of another type, an
unknown or a missing one a TypeError.
"""

from __future__ import annotations

from typing import ClassVar


class KernsealError(Exception):
    """Base of everything kernseal raises.

    Attributes:
        status: name in ``abi/status.yaml``, the same as the C status.
        value: the C status code.
        exit_code: what the CLI exits with.
    """

    status: ClassVar[str] = ""
    value: ClassVar[int] = -1
    exit_code: ClassVar[int] = 1


def _error(
    status: str, value: int, exit_code: int, doc: str, also: tuple[type[Exception], ...] = ()
) -> type[KernsealError]:
    name = "".join(part.title() for part in status.split("_"))
    return type(
        name,
        (KernsealError, *also),
        {
            "status": status,
            "value": value,
            "exit_code": exit_code,
            "__doc__": doc,
            "__module__": __name__,
        },
    )


InvalidArgument = _error(
    "invalid_argument", 1, 2, "A field has a value outside what its documentation allows.", (ValueError,)
)
Unsupported = _error(
    "unsupported", 2, 2, "Valid, but no variant of this bundle does it; the message lists what is there."
)
Misaligned = _error(
    "misaligned", 3, 2, "A pointer or stride is not aligned as the field asks.", (ValueError,)
)
WorkspaceTooSmall = _error(
    "workspace_too_small", 4, 2, "workspace_bytes is less than the workspace query gives.", (ValueError,)
)
Overflow = _error(
    "overflow", 5, 2, "Sizes whose products do not fit the kernel's index arithmetic.", (ValueError,)
)
AbiMismatch = _error(
    "abi_mismatch", 6, 3, "Caller and library were built against ABIs that do not fit together."
)
WrongSm = _error("wrong_sm", 7, 3, "The device, or the asked-for target, is not the SM the artifact is for.")
Missing = _error("missing", 8, 4, "A file that the pins or the manifest name is not there.")
Unknown = _error("unknown", 9, 4, "A file is there that the pins or the manifest do not name.")
Mismatch = _error("mismatch", 10, 4, "Bytes whose SHA-256 is not the pinned one.")
Malformed = _error("malformed", 11, 4, "A file that does not parse as what it must be.")
BadSignature = _error("bad_signature", 12, 5, "A signature that does not verify over these bytes.")
UntrustedKey = _error("untrusted_key", 13, 5, "Signed, but not by enough keys that the policy trusts.")
Expired = _error("expired", 14, 5, "The key's validity had ended.")
Revoked = _error("revoked", 15, 5, "The key has been revoked.")
WrongType = _error("wrong_type", 16, 5, "Payload, statement or predicate type is not the one kernseal signs.")
NoDriver = _error("no_driver", 17, 6, "libcuda.so.1 is not there or lacks a function.")
DriverError = _error(
    "driver_error", 18, 6, "A CUDA driver call failed; the message carries its name, code and text."
)
Capturing = _error("capturing", 19, 6, "Not allowed while the stream is being captured into a graph.")
NotPrepared = _error("not_prepared", 20, 6, "run on a device that prepare was not called for.")
IoError = _error(
    "io_error", 21, 7, "The operating system refused to read or write; the message carries its words."
)
OutOfMemory = _error("out_of_memory", 22, 7, "No host memory.")
BuildFailed = _error("build_failed", 23, 8, "A compiler, assembler or linker of the pinned toolchain failed.")
RuleFailed = _error(
    "rule_failed", 24, 8, "A source patch or PTX rule did not apply exactly as often as it says."
)
SourceInvalid = _error("source_invalid", 25, 9, "The FlashInfer source is not the pinned one.")
ToolchainInvalid = _error("toolchain_invalid", 26, 9, "An installed tool is not the pinned one.")
PinsDiffer = _error("pins_differ", 27, 10, "A build's hashes are not the committed pins.")


class InvalidArgumentType(InvalidArgument, TypeError):  # type: ignore[misc, valid-type]
    """InvalidArgument for a value of another type, and for a field that is unknown or missing."""


class JitRefused(Unsupported):  # type: ignore[misc, valid-type]
    """Unsupported for FlashInfer's own code that would be compiled, where ``loader.flashinfer.install`` refuses that.

    Attributes:
        module: what FlashInfer was about to build.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        super().__init__(
            f"flashinfer was about to compile {module}, and jit='refuse' keeps it from that; call what kernseal replaces "
            "(docs/flashinfer.md), have FlashInfer's code compiled ahead of time (flashinfer-jit-cache), or install with "
            "jit='allow'"
        )


BY_VALUE: dict[int, type[KernsealError]] = {e.value: e for e in KernsealError.__subclasses__()}
