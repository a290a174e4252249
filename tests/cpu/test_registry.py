"""Push and pull against a real registry on this machine, and against registries that lie."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic_bundle as made
from builds import ROOT
from click.testing import CliRunner
from cpu.certificates import self_signed

from kernseal.export import compressed, registry
from kernseal.export.cli import main
from kernseal.export.registry import Transport
from kernseal.loader.errors import InvalidArgument, IoError, Missing, UntrustedKey
from kernseal.loader.policy import Policy
from kernseal.loader.verify import verify_bundle
from kernseal.loader.violations import VerificationFailed

PLAIN = Transport(plain_http=True)
COMMANDS = ("docker-registry", str(ROOT / "build/registry/usr/bin/docker-registry"), "registry")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path, tls: str = "") -> Iterator[str]:
    """``HOST:PORT`` of a registry whose blobs are in ``folder``."""
    command = next((found for name in COMMANDS if (found := shutil.which(name))), None)
    if command is None:
        pytest.skip("no OCI registry on this machine: apt-get install docker-registry")
    host = f"127.0.0.1:{free_port()}"
    settings = (
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\nhttp: {{addr: '{host}'{tls}}}\n"
    )
    config = folder / "config.yml"
    config.write_text(settings + "log: {level: error}\n")
    with (folder / "log").open("w") as log:
        child = subprocess.Popen([command, "serve", str(config)], stdout=log, stderr=log)
    try:
        wait_until_up(host, child, folder / "log")
        yield host
    finally:
        child.terminate()
        child.wait(10)


def wait_until_up(host: str, child: subprocess.Popen[bytes], log: Path) -> None:
    name, port = host.split(":")
    for _ in range(200):
        assert child.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"the registry did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def host(storage: Path) -> Iterator[str]:
    with running(storage) as address:
        yield address


@pytest.fixture
def bundle(tmp_path: Path) -> made.Made:
    result = made.make(tmp_path / "bundle")
    result.restore()
    return result


def policy_of(bundle: made.Made) -> Policy:
    """Pins: they do not ask the clock."""
    return bundle.policy(with_keys=False)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_pulled_bundle_is_the_pushed_one_byte_for_byte(
    bundle: made.Made, tmp_path: Path, host: str
) -> None:
    policy = policy_of(bundle)
    digest = registry.push(bundle.path, f"{host}/kernels/sm_90a:1.2.3", policy, PLAIN).digest
    for number, reference in enumerate(("kernels/sm_90a:1.2.3", f"kernels/sm_90a@{digest}")):
        target = tmp_path / f"pulled{number}"
        result = registry.pull(f"{host}/{reference}", target, policy, PLAIN, sm="sm_90a")
        assert result.bundle.files == verify_bundle(bundle.path, policy=policy).files
        there = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
        assert there == bundle.pristine
    assert (tmp_path / "pulled0/libkernseal.so").stat().st_mode & 0o777 == 0o755


def test_pushing_the_same_bundle_again_gives_the_same_digest(bundle: made.Made, host: str) -> None:
    policy = policy_of(bundle)
    digests = {
        registry.push(bundle.path, f"{host}/again:{tag}", policy, PLAIN).digest
        for tag in ("one", "two", "one")
    }
    assert len(digests) == 1


def test_a_bundle_that_does_not_verify_is_not_sent(bundle: made.Made, host: str, storage: Path) -> None:
    policy = policy_of(bundle)
    (bundle.path / "kernseal.h").write_bytes(b"other")
    with pytest.raises(VerificationFailed):
        registry.push(bundle.path, f"{host}/unsent:1", policy, PLAIN)
    assert not list(storage.rglob("unsent"))


def test_a_bundle_larger_than_a_pull_takes_is_not_sent(
    bundle: made.Made, host: str, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_BUNDLE_BYTES", 1000)
    with pytest.raises(VerificationFailed, match="files of at most 1000 bytes together"):
        registry.push(bundle.path, f"{host}/toolarge:1", policy_of(bundle), PLAIN)
    assert not list(storage.rglob("toolarge"))


def test_a_bundle_that_the_puller_does_not_trust_is_refused_and_leaves_nothing(
    bundle: made.Made, tmp_path: Path, host: str
) -> None:
    registry.push(bundle.path, f"{host}/untrusted:1", policy_of(bundle), PLAIN)
    (tmp_path / "out").mkdir()
    with pytest.raises(UntrustedKey):
        registry.pull(f"{host}/untrusted:1", tmp_path / "out/bundle", Policy(), PLAIN)
    assert visible(tmp_path / "out") == []


def test_a_registry_whose_stored_layers_were_altered_is_refused(
    tmp_path: Path, host: str, storage: Path
) -> None:
    bundle = made.make(tmp_path / "salted", salt="stored")  # blobs that no other test has pushed
    policy = policy_of(bundle)
    registry.push(bundle.path, f"{host}/altered:1", policy, PLAIN)
    library = hashlib.sha256(compressed.pack(bundle.contents["libkernseal.so"])).hexdigest()
    (blob,) = storage.rglob(f"{library}/data")
    data = blob.read_bytes()
    blob.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    (tmp_path / "out").mkdir()
    with pytest.raises(VerificationFailed, match=r"libkernseal\.so: mismatch"):
        registry.pull(f"{host}/altered:1", tmp_path / "out/bundle", policy, PLAIN)
    assert visible(tmp_path / "out") == []


def test_what_is_not_there_is_missing(tmp_path: Path, host: str) -> None:
    with pytest.raises(Missing, match="nothing/here:1"):
        registry.pull(f"{host}/nothing/here:1", tmp_path / "out", Policy(), PLAIN)


def test_a_folder_that_is_there_is_never_replaced(tmp_path: Path, host: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for name in ("mine", "dangling"):
        if name == "dangling":
            (tmp_path / name).symlink_to("nowhere")
        with pytest.raises(InvalidArgument, match="there already"):
            registry.pull(f"{host}/again:one", tmp_path / name, Policy(), PLAIN)
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"


def test_the_commands_push_and_pull_and_say_what_vouched(
    bundle: made.Made, tmp_path: Path, host: str
) -> None:
    lock = tmp_path / "sm_90a.lock.json"
    lock.write_text(json.dumps(made.pins(bundle.document)))
    trust = ["--pins", str(lock), "--plain-http", "--json"]
    pushed = CliRunner().invoke(main, ["push", str(bundle.path), f"{host}/cli:1", *trust])
    assert pushed.exit_code == 0, pushed.output
    sent = json.loads(pushed.output)
    digest = sent["digest"]
    arguments = ["pull", f"{host}/cli@{digest}", str(tmp_path / "out"), "--sm", "90", *trust]
    pulled = CliRunner().invoke(main, arguments)
    assert pulled.exit_code == 0, pulled.output
    report = json.loads(pulled.output)
    assert (report["target"], report["trusted_by"]) == ("sm_90a", ["pins:sm_90a.lock.json"])
    small = sum(len(compressed.pack(data)) for data in bundle.pristine.values())
    large = sum(map(len, bundle.pristine.values()))
    for each in (sent, report):
        found = (each["files"], each["bytes"], each["compressed"])
        assert found == (len(bundle.pristine), large, small)
    arguments[2] = str(tmp_path / "again")
    told = CliRunner().invoke(main, arguments[:-1]).output
    assert f"{len(bundle.pristine)} files of {large:,} bytes, {small:,} compressed" in told


# --- the transport -----------------------------------------------------------------------------------------------------


def test_tls_is_used_unless_plain_http_is_asked_for(bundle: made.Made, tmp_path: Path, host: str) -> None:
    began = time.monotonic()
    with pytest.raises(IoError, match="--plain-http"):
        registry.push(bundle.path, f"{host}/tls:1", policy_of(bundle), Transport())
    assert time.monotonic() - began < 20


def test_a_registry_with_tls_needs_a_certificate_that_is_believed(bundle: made.Made, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    folder = tmp_path / "storage"
    folder.mkdir()
    tls = f", tls: {{certificate: '{certificate}', key: '{key}'}}"
    with running(folder, tls) as address:
        reference = f"{address}/tls:1"
        policy = policy_of(bundle)
        with pytest.raises(IoError, match="--ca"):
            registry.push(bundle.path, reference, policy, Transport())
        registry.push(bundle.path, reference, policy, Transport(ca=certificate))
        registry.pull(reference, tmp_path / "out", policy, Transport(ca=certificate))
        with pytest.raises(IoError):
            registry.pull(reference, tmp_path / "other", policy, PLAIN)
    assert visible(tmp_path / "out") == visible(bundle.path)
    assert not (tmp_path / "other").exists()


def test_a_registry_that_is_not_there_is_an_error_at_once(bundle: made.Made) -> None:
    began = time.monotonic()
    with pytest.raises(IoError, match="ConnectionError"):
        registry.push(bundle.path, f"127.0.0.1:{free_port()}/x:1", policy_of(bundle), PLAIN)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "reference",
    ["kernels:1", "127.0.0.1:5000/a", "127.0.0.1:5000/A:1", "127.0.0.1:5000/../a:1", "http://127.0.0.1:5000/a:1",
     "127.0.0.1:5000/a:1@sha256:" + "0" * 64, "127.0.0.1:5000/a@sha256:0", "user@127.0.0.1:5000/a:1", "", "x\n"],
)  # fmt: skip
def test_what_is_not_a_reference_is_refused_before_anything_is_sent(reference: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"supported is HOST\[:PORT\]/NAME:TAG"):
        registry.pull(reference, tmp_path / "out", Policy(), PLAIN)


def test_a_push_to_a_digest_is_refused(bundle: made.Made) -> None:
    with pytest.raises(InvalidArgument, match="a push gives a tag"):
        registry.push(bundle.path, "127.0.0.1:5000/a@sha256:" + "0" * 64, policy_of(bundle), PLAIN)


# --- registries that lie -----------------------------------------------------------------------------------------------


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Liar:
    """A registry that serves whatever it was given: one manifest, and blobs by the digest that is asked for.

    Args:
        packed: as a push sends it, or as one did before it compressed.
    """

    def __init__(self, contents: dict[str, bytes], packed: bool = True) -> None:
        sent = {name: compressed.pack(data) if packed else data for name, data in contents.items()}
        sizes = {name: len(data) for name, data in contents.items()}
        self.manifest: Any = json.loads(registry.registry_manifest(sent, sizes))
        if not packed:
            for layer in self.manifest["layers"]:
                layer["mediaType"] = "application/vnd.kernseal.bundle.file.v1"
                del layer["annotations"][registry.SIZE]
        self.blobs = {digest_of(data): data for data in sent.values()}
        self.raw: bytes | None = None
        self.headers: dict[str, str] = {}

    def layer(self, name: str) -> dict[str, Any]:
        return next(x for x in self.manifest["layers"] if x["annotations"][registry.TITLE] == name)

    def answer(self, path: str) -> bytes | None:
        if "/manifests/" in path:
            return self.raw if self.raw is not None else json.dumps(self.manifest).encode()
        return self.blobs.get(path.rsplit("/", 1)[1])


@contextlib.contextmanager
def serving(liar: Liar) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = liar.answer(self.path)
            self.send_response(200 if data is not None else 404)
            for name, value in {"Content-Length": str(len(data or b"")), **liar.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data or b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def retitled(title: Any) -> Callable[[Liar], None]:
    def lie(liar: Liar) -> None:
        liar.layer("kernseal.h")["annotations"][registry.TITLE] = title

    return lie


def of_layer(field: str, value: Any) -> Callable[[Liar], None]:
    def lie(liar: Liar) -> None:
        liar.layer("kernseal.h")[field] = value

    return lie


def of_manifest(field: str, value: Any) -> Callable[[Liar], None]:
    def lie(liar: Liar) -> None:
        liar.manifest[field] = value

    return lie


def raw(data: bytes) -> Callable[[Liar], None]:
    def lie(liar: Liar) -> None:
        liar.raw = data

    return lie


def altered(liar: Liar) -> None:
    """Other bytes under the digest that was asked for."""
    liar.blobs[liar.layer("kernseal.h")["digest"]] = b"#error\n         "


def longer(liar: Liar) -> None:
    liar.blobs[liar.layer("kernseal.h")["digest"]] += b"x" * 5_000_000


def gzipped(liar: Liar) -> None:
    """The right bytes, once unpacked as the answer says: but then it could unpack to anything."""
    liar.headers["Content-Encoding"] = "gzip"
    liar.blobs = {digest: gzip.compress(data) for digest, data in liar.blobs.items()}


def serves(data: bytes, announced: int | str) -> Callable[[Liar], None]:
    """As one layer, hashed correctly, and announced to unpack to this many bytes."""

    def lie(liar: Liar) -> None:
        layer = liar.layer("kernseal.h")
        layer.update(digest=digest_of(data), size=len(data), mediaType=registry.PACKED_TYPE)
        layer["annotations"][registry.SIZE] = str(announced)
        liar.blobs[digest_of(data)] = data

    return lie


OTHER = b"/* generated elsewhere */\n"
PACKED = compressed.pack(OTHER)


def honest_digest_of_other_bytes(liar: Liar) -> None:
    """What a registry can do that hashes everything correctly: serve another file."""
    layer = liar.layer("kernseal.h")
    data = PACKED if layer["mediaType"] == registry.PACKED_TYPE else OTHER
    layer.update(digest=digest_of(data), size=len(data))
    liar.blobs[digest_of(data)] = data


def much_together(liar: Liar) -> None:
    """Each file as large as one may be, and more of them than fit."""
    for layer in liar.manifest["layers"][:3]:
        layer["mediaType"] = registry.PACKED_TYPE
        layer["annotations"][registry.SIZE] = str(2 << 30)


def swapped(liar: Liar) -> None:
    one, two = liar.layer("kernseal.h"), liar.layer("kernseal_pins.h")
    one["annotations"], two["annotations"] = two["annotations"], one["annotations"]


def dropped(liar: Liar) -> None:
    liar.manifest["layers"].remove(liar.layer("kernseal.h"))


def doubled(liar: Liar) -> None:
    liar.manifest["layers"].append(liar.layer("kernseal.h"))


def added(liar: Liar) -> None:
    layer = json.loads(json.dumps(liar.layer("kernseal.h")))
    layer["annotations"][registry.TITLE] = "sitecustomize.py"
    liar.manifest["layers"].append(layer)


def folder_and_file(liar: Liar) -> None:
    layer = json.loads(json.dumps(liar.layer("kernseal.h")))
    layer["annotations"][registry.TITLE] = "kernseal.h/x"
    liar.manifest["layers"].append(layer)


LIES: dict[str, Callable[[Liar], None]] = {
    "altered bytes": altered,
    "more bytes": longer,
    "an encoding": gzipped,
    "another file, hashed": honest_digest_of_other_bytes,
    "gzip of another file": serves(PACKED, len(OTHER)),
    "gzip of more than is announced": serves(compressed.pack(bytes(64 << 20)), 1000),
    "gzip of less than is announced": serves(PACKED, len(OTHER) + 1),
    "gzip that ends early": serves(PACKED[:-1], len(OTHER)),
    "gzip with another checksum": serves(PACKED[:-8] + bytes(8), len(OTHER)),
    "gzip with bytes after it": serves(PACKED + b"x", len(OTHER)),
    "gzip twice": serves(PACKED * 2, len(OTHER) * 2),
    "no gzip": serves(OTHER, len(OTHER)),
    "nothing as gzip": serves(b"", 0),
    "a huge file announced": serves(PACKED, 1 << 62),
    "a negative file announced": serves(PACKED, -1),
    "huge files announced together": much_together,
    "two files swapped": swapped,
    "a file left out": dropped,
    "a file twice": doubled,
    "a file more": added,
    "a file that is a folder": folder_and_file,
    "no manifest.json": lambda liar: liar.manifest["layers"].remove(liar.layer("manifest.json")),
    "title ../x": retitled("../x"),
    "title a/../../x": retitled("a/../../x"),
    "title /etc/x": retitled("/etc/x"),
    "title .": retitled("."),
    "title empty": retitled(""),
    "title with NUL": retitled("a\0b"),
    "title with backslash": retitled("..\\x"),
    "title of another type": retitled(7),
    "title too long": retitled("a" * 600),
    "digest of another kind": of_layer("digest", "md5:" + "0" * 32),
    "digest with a path": of_layer("digest", "sha256:../../secret"),
    "negative size": of_layer("size", -1),
    "huge size": of_layer("size", 1 << 62),
    "size of another type": of_layer("size", "3"),
    "a folder's media type": of_layer("mediaType", "application/vnd.oci.image.layer.v1.tar+gzip"),
    "foreign urls": of_layer("urls", ["http://127.0.0.1:1/x"]),
    "no annotations": of_layer("annotations", None),
    "layers of another type": of_manifest("layers", {"x": 1}),
    "an index": of_manifest("mediaType", "application/vnd.oci.image.index.v1+json"),
    "another artifact": of_manifest("artifactType", "application/vnd.example"),
    "another schema": of_manifest("schemaVersion", 1),
    "more fields": of_manifest("subject", {}),
    "not JSON": raw(b"<html>"),
    "nothing": raw(b""),
    "deep JSON": raw(b"[" * 100_000),
    "duplicate keys": raw(b'{"layers":[],"layers":[]}'),
    "endless manifest": raw(b" " * (5 << 20)),
}  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_a_registry_that_serves(lie: str, packed: bool, bundle: made.Made, tmp_path: Path) -> None:
    liar = Liar(bundle.pristine, packed)
    LIES[lie](liar)
    (tmp_path / "out").mkdir()
    with serving(liar) as host, pytest.raises((VerificationFailed, Missing)) as caught:
        registry.pull(f"{host}/x:1", tmp_path / "out/bundle", policy_of(bundle), PLAIN)
    assert visible(tmp_path / "out") == []
    assert not (tmp_path / "x").exists()
    assert str(caught.value).isascii()


@pytest.mark.parametrize("packed", [True, False])
def test_a_registry_that_tells_the_truth_is_believed(packed: bool, bundle: made.Made, tmp_path: Path) -> None:
    with serving(Liar(bundle.pristine, packed)) as host:
        registry.pull(f"{host}/x:1", tmp_path / "pulled", policy_of(bundle), PLAIN)
    assert visible(tmp_path / "pulled") == visible(bundle.path)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
@pytest.mark.parametrize("kind", ["zeros", "noise"])
def test_what_is_packed_unpacks_to_the_same(size: int, kind: str) -> None:
    data = bytes(size) if kind == "zeros" else random.Random(size).randbytes(size)
    assert b"".join(compressed.unpack(io.BytesIO(compressed.pack(data)), size, "x")) == data


def test_never_more_is_unpacked_than_was_announced() -> None:
    """Of 64 MiB of zeros, announced as 3,000,000 bytes."""
    written = 0
    with pytest.raises(VerificationFailed, match="more than 3000000 bytes"):
        for piece in compressed.unpack(io.BytesIO(compressed.pack(bytes(64 << 20))), 3_000_000, "x"):
            written += len(piece)
    assert written <= 3_000_000


@pytest.mark.parametrize(
    ("data", "size", "said"),
    [
        (PACKED, len(OTHER) - 1, "more than"),
        (PACKED, len(OTHER) + 1, "all of them"),
        (PACKED[:-1], len(OTHER), "all of them"),
        (PACKED[:-8] + bytes(8), len(OTHER), "incorrect data check"),
        (PACKED + b"x", len(OTHER), "after its gzip member"),
        (PACKED * 2, len(OTHER), "after its gzip member"),
        (OTHER, len(OTHER), "incorrect header check"),
        (b"", 0, "all of them"),
    ],
)
def test_what_is_not_one_whole_gzip_member_of_its_size_is_refused(data: bytes, size: int, said: str) -> None:
    with pytest.raises(VerificationFailed, match=said):
        list(compressed.unpack(io.BytesIO(data), size, "x"))


def test_what_travels_is_hashed_before_it_is_unpacked(
    bundle: made.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[str] = []
    monkeypatch.setattr(compressed, "unpack", lambda _, size, name: unpacked.append(name) or [bytes(size)])
    liar = Liar(bundle.pristine)
    altered(liar)
    with serving(liar) as host, pytest.raises(VerificationFailed, match="of its layer"):
        registry.pull(f"{host}/x:1", tmp_path / "out", policy_of(bundle), PLAIN)
    assert "kernseal.h" not in unpacked


def test_another_manifest_than_the_digest_names_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    other = made.make(tmp_path / "other", salt="older")
    other.restore()
    wanted = hashlib.sha256(json.dumps(Liar(bundle.pristine).manifest).encode()).hexdigest()
    with serving(Liar(other.pristine)) as host, pytest.raises(VerificationFailed, match="of the reference"):
        registry.pull(f"{host}/x@sha256:{wanted}", tmp_path / "out", policy_of(other), PLAIN)
    assert not (tmp_path / "out").exists()


def test_a_bundle_for_another_sm_than_asked_for_is_refused(bundle: made.Made, tmp_path: Path) -> None:
    with serving(Liar(bundle.pristine)) as host, pytest.raises(VerificationFailed, match="wrong_sm"):
        registry.pull(f"{host}/x:1", tmp_path / "out", policy_of(bundle), PLAIN, sm="sm_120a")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_download_leaves_nothing(bundle: made.Made, tmp_path: Path) -> None:
    liar = Liar(bundle.pristine)
    (tmp_path / "out").mkdir()
    asked: list[str] = []

    def stop_at_the_third_blob(path: str) -> bytes | None:
        asked.append(path)
        return None if len(asked) > 3 else Liar.answer(liar, path)

    liar.answer = stop_at_the_third_blob  # type: ignore[method-assign]
    with serving(liar) as host, pytest.raises(Missing):
        registry.pull(f"{host}/x:1", tmp_path / "out/bundle", policy_of(bundle), PLAIN)
    assert len(asked) == 4
    assert visible(tmp_path / "out") == []
