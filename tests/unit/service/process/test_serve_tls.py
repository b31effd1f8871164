"""The service over TLS, beside a stand-in for Ray: it answers whoever trusts its certificate, and
nobody in plain text."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from everstep.options.model import SettingsError
from everstep.options.serve import ServeOptions
from service.settings import Settings
from tests.support.fake_ray import FakeRay, serving
from tests.support.service_process import free_port, wait_for

pytestmark = pytest.mark.slow


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for loopback that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "everstep")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key_path.write_bytes(key.private_bytes(*pem))
    return cert_path, key_path


def serve(home: Path, ray: FakeRay, port: int, **env: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "everstep.cli.main",
        "serve",
        "--port",
        str(port),
        "--ray-address",
        ray.url,
    ]
    environ = {**os.environ, "EVERSTEP_HOME": str(home), "RAY_AUTH_TOKEN": ray.token, **env}
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_answers_over_tls_and_tells_its_clients_so(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port, home = free_port(), tmp_path / "home"
    url = f"https://127.0.0.1:{port}"
    with serving(FakeRay()) as ray:
        env = {
            "EVERSTEP_TLS_CERT": str(cert),
            "EVERSTEP_TLS_KEY": str(key),
            "EVERSTEP_PUBLIC_URL": url,
        }
        process = serve(home, ray, port, **env)
        try:
            trusting = ssl.create_default_context(cafile=str(cert))
            wait_for(lambda: (home / "url").exists(), 60, "the service's URL")
            with httpx.Client(base_url=url, verify=trusting, trust_env=False) as http:
                wait_for(lambda: answers(http), 60, "an answer")
            assert (home / "url").read_text().strip() == url
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(f"{url}/healthz", trust_env=False)
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.ConnectError:
        return False


def test_a_certificate_that_cannot_be_used_ends_the_start_with_the_way_out(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    (tmp_path / "other.pem").write_text("no key")
    env = {
        "EVERSTEP_TLS_CERT": str(cert),
        "EVERSTEP_TLS_KEY": str(tmp_path / "other.pem"),
        "EVERSTEP_PUBLIC_URL": "https://a",
    }
    with serving(FakeRay()) as ray:
        process = serve(tmp_path / "home", ray, free_port(), **env)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and "TLS cannot be served" in error and "other.pem" in error


def test_tls_is_whole_or_not_at_all(tmp_path: Path) -> None:
    given = {
        "EVERSTEP_TLS_CERT": "/a",
        "EVERSTEP_TLS_KEY": "/b",
        "EVERSTEP_PUBLIC_URL": "https://es.example.org",
    }
    for environ, expected in ((given, (Path("/a"), Path("/b"))), ({}, (None, None))):
        read = ServeOptions.read(environ)
        assert (read.tls_cert, read.tls_key) == expected
    with pytest.raises(SettingsError, match="EVERSTEP_TLS_KEY"):
        Settings(home=tmp_path, tls_cert=Path("/a"))
    with pytest.raises(SettingsError, match="EVERSTEP_PUBLIC_URL"):
        Settings(home=tmp_path, tls_cert=Path("/a"), tls_key=Path("/b"))
