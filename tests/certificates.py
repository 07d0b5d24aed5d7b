"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def make_authority(directory: Path, name: str = "authority") -> Certificate:
    """Make a certificate that may sign others."""
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(
        "req", "-x509", *_NEW_KEY, "-keyout", made.key, "-out", made.certificate, "-days", "2", "-subj", f"/CN={name}"
    )
    return made


def make_certificate(directory: Path, authority: Certificate, name: str, address: str, *, days: int = 2) -> Certificate:
    """Make a certificate for an IP address, signed by `authority`; with days below 0 it has expired."""
    return _make(directory, authority, name, f"IP:{address}", days)


def make_named_certificate(directory: Path, authority: Certificate, host: str) -> Certificate:
    """Make a certificate for the name of a machine, signed by `authority`."""
    return _make(directory, authority, host, f"DNS:{host}")


def _make(directory: Path, authority: Certificate, name: str, subject: str, days: int = 2) -> Certificate:
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    request, extensions = directory / f"{name}.csr", directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={subject}\n")
    _openssl("req", *_NEW_KEY, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}")
    signer = ("-CA", authority.certificate, "-CAkey", authority.key, "-CAcreateserial")
    made_of = ("-in", request, "-extfile", extensions, "-days", str(days))
    _openssl("x509", "-req", *made_of, *signer, "-out", made.certificate)
    return made


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *map(str, arguments)], check=True, capture_output=True, timeout=30)
