"""Places on this machine that hold files as object stores and web servers do, for their real clients."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def part(self, body: bytes) -> None:
        """The body, or the range of it that was asked for."""
        span = self.headers.get("Range")
        if span is None:
            self.answer(200, body, Accept_Ranges="bytes")
            return
        first, last = span.removeprefix("bytes=").split("-")
        end = min(int(last or len(body) - 1), len(body) - 1)
        at = f"bytes {first}-{end}/{len(body)}"
        self.answer(206, body[int(first) : end + 1], Content_Range=at, Accept_Ranges="bytes")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _running(handler: type[_Quiet], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def https(files: Mapping[str, bytes], folder: Path) -> Iterator[tuple[str, Path]]:
    """A web server with a certificate of its own; yields its address and the authority to trust.

    `/broken/…` answers 500.
    """

    class Handler(_Quiet):
        def reply(self) -> None:
            path = unquote(self.path)
            if path.startswith("/broken/"):
                self.answer(500)
            elif path in files:
                self.part(files[path])
            else:
                self.answer(404)

        do_GET = do_HEAD = reply

    authority = _certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with _running(Handler, context) as port:
        yield f"https://127.0.0.1:{port}", authority


@contextmanager
def google_storage(bucket: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The part of Google's JSON API that lists and reads objects; yields its address."""

    def described(name: str) -> dict[str, object]:
        return {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(files[name]))} | {
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
            "generation": "1",
            "storageClass": "STANDARD",
        }

    class Handler(_Quiet):
        def do_GET(self) -> None:
            parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
            _, found, rest = parts.path.partition(f"/storage/v1/b/{bucket}/o")
            name = unquote(rest.removeprefix("/"))
            if not found or (name and name not in files):
                self.answer(404, json.dumps({"error": {"code": 404, "message": "Not Found"}}).encode())
            elif name and query.get("alt") == ["media"]:
                self.part(files[name])
            elif name:
                self.answer(200, json.dumps(described(name)).encode(), Content_Type="application/json")
            else:
                prefix = query.get("prefix", [""])[0]
                inside = [each for each in files if each.startswith(prefix)]
                items = [described(each) for each in inside if "/" not in each[len(prefix) :]]
                body = {"kind": "storage#objects", "items": items, "prefixes": []}
                self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

    with _running(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def _certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file
