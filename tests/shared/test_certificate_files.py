from __future__ import annotations

import ssl
import subprocess
import time
from pathlib import Path

import pytest

from shared.certificate_files import CertificateFileError, load_certificate, validity_problem
from tests.certificates import OPENSSL, Certificate, make_authority, make_certificate

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
DAY_S = 86400


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    directory = tmp_path_factory.mktemp("certificates")
    authority = make_authority(directory)
    own = make_certificate(directory, authority, "own", "127.0.0.1")
    assert OPENSSL is not None
    for options in (
        ["x509", "-in", own.certificate, "-outform", "der", "-out", directory / "der"],
        ["ec", "-in", own.key, "-aes256", "-passout", "pass:abcd", "-out", directory / "locked"],
    ):
        subprocess.run([OPENSSL, *map(str, options)], check=True, capture_output=True, timeout=30)
    (directory / "both").write_text(own.certificate.read_text() + own.key.read_text())
    (directory / "torn").write_text(own.key.read_text().replace("M", "N"))
    return own


def load(cert: Path, key: Path | None) -> None:
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)


def test_certificate_and_key_are_loaded_from_two_files_or_one(made: Certificate) -> None:
    load(made.certificate, made.key)
    load(made.certificate.with_name("both"), None)


@pytest.mark.parametrize(
    ("cert", "key", "is_key", "problem"),
    [
        ("none.pem", "own.key", False, "none.pem cannot be read: No such file"),
        ("own.pem", "none.key", True, "none.key cannot be read: No such file"),
        (".", "own.key", False, "cannot be read: Is a directory"),
        ("der", "own.key", False, "der is not in PEM form; if it is DER: openssl x509 -inform der -in "),
        ("own.key", "own.pem", False, "own.key holds no certificate; are the two files swapped?"),
        ("own.csr", "own.key", False, "own.csr holds no certificate"),
        ("own.pem", None, True, "own.pem holds no private key; name the file with its key"),
        ("own.pem", "own.pem", True, "own.pem holds no private key"),
        ("own.pem", "locked", True, "locked has a password; write it without one: openssl pkey -in "),
        ("own.pem", "authority.key", True, "authority.key is not that of "),
        ("own.pem", "torn", False, "are not a certificate and its key"),
    ],
)
def test_file_that_cannot_be_used_is_named_with_the_remedy(
    made: Certificate, cert: str, key: str | None, is_key: bool, problem: str
) -> None:
    directory = made.certificate.parent
    with pytest.raises(CertificateFileError) as raised:
        load(directory / cert, None if key is None else directory / key)
    assert problem in str(raised.value)
    assert raised.value.is_key is is_key


def test_certificate_is_valid_for_its_days_alone(made: Certificate) -> None:
    now = time.time()
    assert validity_problem(made.certificate, now + 60) is None
    assert "is valid from " in (validity_problem(made.certificate, now - DAY_S) or "")
    end = time.strftime("%Y-%m-%d", time.gmtime(_end(made.certificate)))
    assert (validity_problem(made.certificate, now + 3 * DAY_S) or "").endswith(f"own.pem expired on {end}")
    assert validity_problem(made.key, now) is None


def _end(certificate: Path) -> float:
    """When it ends, as openssl reads it."""
    assert OPENSSL is not None
    command = [OPENSSL, "x509", "-in", str(certificate), "-noout", "-enddate"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return ssl.cert_time_to_seconds(done.stdout.strip().removeprefix("notAfter="))
