"""``push`` and ``pull``: a bundle in an OCI registry, one gzip layer a file. The registry is believed in nothing.

What comes back lies in a folder of its own until the policy has accepted it; only then does it get its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import requests
from oras.container import Container
from oras.provider import Registry

from kernseal.export import compressed, files, whole
from kernseal.export.compressed import Sizes
from kernseal.loader import canonical
from kernseal.loader.errors import InvalidArgument, IoError, KernsealError, Missing
from kernseal.loader.policy import Policy
from kernseal.loader.safe_read import MAX_ENTRIES, MAX_FILE_BYTES, NAME, NAME_RULE
from kernseal.loader.statement import RESERVED
from kernseal.loader.strict_json import Cursor, parse
from kernseal.loader.verify import VerifiedBundle, verify_bundle
from kernseal.loader.violations import Malformed, Mismatch, failed, raise_first

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
BUNDLE_TYPE = "application/vnd.kernseal.bundle.v1"
FILE_TYPE = "application/vnd.kernseal.bundle.file.v1"
"""A file as it is: what a push sent before it compressed."""
PACKED_TYPE = f"{FILE_TYPE}+gzip"
EMPTY_TYPE, EMPTY = "application/vnd.oci.empty.v1+json", b"{}"
TITLE = "org.opencontainers.image.title"
SIZE = "vnd.kernseal.bundle.file.size"
"""Annotation of a packed layer: the bytes of the file in it."""
MAX_BUNDLE_BYTES = 4 << 30
"""Of all files together: a little gzip can announce a lot."""
MAX_MANIFEST_BYTES = 4 << 20
TIMEOUT_SECONDS = 60
_CHUNK = 1 << 20

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = r"(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+)(?::[0-9]{1,5})?"
_PATH = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
REFERENCE = re.compile(
    rf"(?P<host>{_HOST})/(?P<path>{_PATH})(?::(?P<tag>\w[\w.-]{{0,127}})|@(?P<digest>{_DIGEST.pattern}))",
    re.A,
)
REFERENCE_RULE = "HOST[:PORT]/NAME:TAG or HOST[:PORT]/NAME@sha256:..."


@dataclass(frozen=True)
class Transport:
    """How a registry is reached.

    Attributes:
        plain_http: without TLS. Nothing else ever turns TLS off.
        ca: certificates to believe instead of the system's.
    """

    plain_http: bool = False
    ca: Path | None = None


@dataclass(frozen=True)
class Layer:
    """One file as the registry's manifest has it.

    Attributes:
        sha256, size: of what travels.
        bytes: of the file.
        packed: what travels is the file as gzip.
    """

    name: str
    sha256: str
    size: int
    bytes: int
    packed: bool


@dataclass(frozen=True)
class Pushed:
    """``digest`` is that of the registry's manifest, ``sha256:...``: with it, the reference can be pulled for ever."""

    digest: str
    sizes: Sizes


@dataclass(frozen=True)
class Pulled:
    """A bundle that came, as it was verified."""

    bundle: VerifiedBundle
    sizes: Sizes


def push(bundle: Path, reference: str, policy: Policy, transport: Transport) -> Pushed:
    """Upload a bundle that ``policy`` accepts.

    Raises:
        VerificationFailed: the policy does not accept the bundle, or it is more than a pull takes; nothing was sent.
        InvalidArgument: the reference is not one, or names a digest.
        IoError: the registry could not be reached or refused.
    """
    if _parsed(reference)["digest"]:
        raise InvalidArgument(
            f"reference {reference!r}: a push gives a tag; supported is HOST[:PORT]/NAME:TAG"
        )
    found = whole.read(bundle, policy)
    packed = {name: compressed.pack(data) for name, data in found.files.items()}
    manifest = registry_manifest(packed, {name: len(data) for name, data in found.files.items()})
    layers = read_manifest(manifest)  # as pull will read it: what that refuses is not sent
    remote = _Remote(reference, transport)
    with tempfile.TemporaryDirectory(prefix="kernseal-push-") as folder, remote.errors():
        blob = Path(folder) / "blob"
        for data in (EMPTY, *packed.values()):
            blob.write_bytes(data)
            remote.upload(blob, data)
        remote.upload_manifest(manifest)
    return Pushed(f"sha256:{hashlib.sha256(manifest).hexdigest()}", _sizes(layers))


def registry_manifest(packed: Mapping[str, bytes], sizes: Mapping[str, int]) -> bytes:
    """The OCI manifest of a bundle: its files in order of path.

    Args:
        packed: what travels of each.
        sizes: its bytes when unpacked.
    """
    layers = [
        {
            **_descriptor(PACKED_TYPE, packed[name]),
            "annotations": {SIZE: str(sizes[name]), TITLE: name},
        }
        for name in sorted(packed)
    ]
    return canonical.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": BUNDLE_TYPE,
            "config": _descriptor(EMPTY_TYPE, EMPTY),
            "layers": layers,
        }
    )


def _descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def pull(reference: str, target: Path, policy: Policy, transport: Transport, sm: str | None = None) -> Pulled:
    """Download a bundle; ``target`` appears when the policy has accepted it, and not before.

    Args:
        target: folder to make; must not be there.
        sm: the target that the bundle must be for; any when None.

    Raises:
        VerificationFailed: what the registry served is not a bundle, or not one that the policy accepts.
        InvalidArgument: the reference is not one, or the folder is there already.
        Missing: the registry has no such reference.
        IoError: the registry could not be reached or refused.
    """
    if target.exists() or target.is_symlink():
        raise InvalidArgument(f"folder {str(target)!r}: is there already; supported is a name that is free")
    remote = _Remote(reference, transport)
    with files.staged_folder(target) as stage:
        with remote.errors():
            layers = read_manifest(remote.manifest())
            for layer in layers:
                _fetch(remote, layer, stage)
        verify_bundle(stage, policy=policy, sm=sm)
    return Pulled(verify_bundle(target, policy=policy, sm=sm), _sizes(layers))


def _sizes(layers: Sequence[Layer]) -> Sizes:
    return Sizes(len(layers), sum(layer.bytes for layer in layers), sum(layer.size for layer in layers))


def read_manifest(data: bytes) -> list[Layer]:
    """The files that a registry's manifest names.

    Raises:
        VerificationFailed: Malformed or WrongType; nothing in it that could leave a folder gets through.
    """
    root = parse(data, "registry manifest", limit=MAX_MANIFEST_BYTES)
    fields = root.fields("schemaVersion", "mediaType", "artifactType", "config", "layers")
    fields["schemaVersion"].constant(2)
    fields["mediaType"].constant(MANIFEST_TYPE)
    fields["artifactType"].constant(BUNDLE_TYPE)
    layers = [_layer(item) for item in fields["layers"].items()]
    names = {layer.name for layer in layers}
    if len(names) != len(layers):
        fields["layers"].refuse("each file once")
    if len(layers) > MAX_ENTRIES:
        fields["layers"].refuse(f"at most {MAX_ENTRIES} files")
    if sum(layer.bytes for layer in layers) > MAX_BUNDLE_BYTES:
        fields["layers"].refuse(f"files of at most {MAX_BUNDLE_BYTES} bytes together")
    if not names.issuperset(RESERVED):
        fields["layers"].refuse(f"{' and '.join(RESERVED)} among the files")
    if any(name[:end] in names for name in names for end, mark in enumerate(name) if mark == "/"):
        fields["layers"].refuse("no file that is also a folder")
    raise_first(root.sink)
    return layers


def _layer(item: Cursor) -> Layer:
    fields = item.fields("mediaType", "digest", "size", "annotations")
    packed = fields["mediaType"].one_of((FILE_TYPE, PACKED_TYPE)) == PACKED_TYPE
    annotations = fields["annotations"].fields(TITLE, *([SIZE] if packed else []))
    size = fields["size"].integer(0, MAX_FILE_BYTES)
    return Layer(
        annotations[TITLE].text(NAME, NAME_RULE),
        fields["digest"].text(_DIGEST, "sha256: and 64 lower-case hex digits").removeprefix("sha256:"),
        size,
        _announced(annotations[SIZE]) if packed else size,
        packed,
    )


def _announced(size: Cursor) -> int:
    """Values of annotations are text."""
    rule = f"the digits of an integer from 0 to {MAX_FILE_BYTES}"
    number = int(size.text(_NUMBER, rule) or 0)
    if number > MAX_FILE_BYTES:
        size.refuse(rule)
    return number


def _fetch(remote: _Remote, layer: Layer, stage: Path) -> None:
    """One file into the stage. What travels is hashed before any of it is unpacked."""
    path = stage / layer.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as handle:
        if layer.packed:
            with tempfile.TemporaryFile(dir=stage) as blob:
                _download(remote, layer, blob)
                blob.seek(0)
                handle.writelines(compressed.unpack(blob, layer.bytes, layer.name))
        else:
            _download(remote, layer, handle)
    path.chmod(whole.mode(layer.name))


def _download(remote: _Remote, layer: Layer, handle: BinaryIO) -> None:
    """A layer's blob, no longer than it says and with the digest it says."""
    digest, size = hashlib.sha256(), 0
    with contextlib.closing(remote.blob(layer.sha256)) as chunks:
        for chunk in chunks:
            size += len(chunk)
            if size > layer.size:
                raise failed(Malformed(layer.name, f"more than {layer.size} bytes", f"{layer.size} bytes"))
            digest.update(chunk)
            handle.write(chunk)
    if digest.hexdigest() != layer.sha256:
        raise failed(
            Mismatch(layer.name, f"sha256 {digest.hexdigest()}", f"sha256 {layer.sha256} of its layer")
        )


class _Client(Registry):  # type: ignore[misc,unused-ignore]
    """oras without its two minutes of retries, and with a time limit for each answer."""

    def __init__(self, transport: Transport) -> None:
        verify = str(transport.ca) if transport.ca else True
        super().__init__(insecure=transport.plain_http, tls_verify=verify)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Impatient())

    do_request = Registry.do_request.__wrapped__


class _Impatient(requests.adapters.HTTPAdapter):  # type: ignore[misc,unused-ignore]
    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = kwargs.get("timeout") or TIMEOUT_SECONDS
        return super().send(*args, **kwargs)


class _Remote:
    """One reference in one registry."""

    def __init__(self, reference: str, transport: Transport) -> None:
        parsed = _parsed(reference)
        if transport.ca and not transport.ca.is_file():
            raise InvalidArgument(f"--ca {str(transport.ca)!r}: supported is a file of PEM certificates")
        self.reference = reference
        self.digest = parsed["digest"]
        self.client = _Client(transport)
        self.container = Container(reference)
        read = (self.container.registry, self.container.api_prefix, self.container.digest)
        if read != (parsed["host"], parsed["path"], self.digest):  # two readers of one name must agree on it
            raise InvalidArgument(f"reference {reference!r}: supported is {REFERENCE_RULE}")
        self.base = f"{self.client.prefix}://"

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Whatever the network does is an IoError that names the reference."""
        try:
            self.client.auth.load_configs(self.container)
            yield
        except KernsealError:
            raise
        except requests.exceptions.SSLError as error:
            hint = "is it plain HTTP (--plain-http), or signed by a CA of your own (--ca)?"
            raise IoError(f"registry {self.reference}: TLS: {error}; {hint}") from None
        except requests.RequestException as error:
            raise IoError(f"registry {self.reference}: {type(error).__name__}: {error}") from None
        except ValueError as error:  # oras' word for an answer that it does not like
            raise IoError(f"registry {self.reference}: {error}") from None

    def manifest(self) -> bytes:
        url = self.base + self.container.manifest_url()
        data = b""
        for chunk in self._answer(url, {"Accept": MANIFEST_TYPE}):
            data += chunk
            if len(data) > MAX_MANIFEST_BYTES:
                found = f"more than {MAX_MANIFEST_BYTES} bytes"
                raise failed(Malformed("registry manifest", found, f"at most {MAX_MANIFEST_BYTES} bytes"))
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if self.digest and found != self.digest:
            raise failed(Mismatch("registry manifest", found, f"{self.digest} of the reference"))
        return data

    def blob(self, sha256: str) -> Generator[bytes, None, None]:
        return self._answer(self.base + self.container.get_blob_url(f"sha256:{sha256}"), {})

    def _answer(self, url: str, headers: dict[str, str]) -> Generator[bytes, None, None]:
        # Sent as it is stored: an encoding could unpack to anything.
        headers["Accept-Encoding"] = "identity"
        with self.client.do_request(url, "GET", headers=headers, stream=True) as response:
            self._check(response)
            while chunk := response.raw.read(_CHUNK, decode_content=False):
                yield chunk

    def upload(self, blob: Path, data: bytes) -> None:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        layer = {"digest": digest, "size": len(data), "mediaType": PACKED_TYPE}
        self._check(self.client.upload_blob(str(blob), self.container, layer))

    def upload_manifest(self, manifest: bytes) -> None:
        url = self.base + self.container.manifest_url()
        headers = {"Content-Type": MANIFEST_TYPE}
        self._check(self.client.do_request(url, "PUT", data=manifest, headers=headers))

    def _check(self, response: requests.Response) -> None:
        if response.status_code == 404:
            raise Missing(f"registry {self.reference}: has no such thing ({response.request.path_url})")
        if response.status_code not in (200, 201, 202):
            raise IoError(f"registry {self.reference}: answered {response.status_code} {response.reason}")


def _parsed(reference: str) -> dict[str, str | None]:
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise InvalidArgument(f"reference {reference!r}: supported is {REFERENCE_RULE}")
    return match.groupdict()
