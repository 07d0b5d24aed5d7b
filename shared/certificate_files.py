"""Files with a certificate and its key: error messages name the file and the remedy."""

from __future__ import annotations

import re
import ssl
import time
from calendar import timegm
from pathlib import Path

# In a certificate's bytes: when it begins and when it ends, as X.509 writes both (RFC 5280, 4.1.2.5).
_TIME = rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)"
_VALIDITY = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class CertificateFileError(Exception):
    """A file cannot be used; `is_key` if it is the one with the key."""

    def __init__(self, problem: str, *, is_key: bool) -> None:
        super().__init__(problem)
        self.is_key = is_key


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Let a context show a certificate, whose key may be in `cert` too; `CertificateFileError` if it cannot."""
    text = _read(cert, is_key=False)
    if _CERTIFICATE.search(text) is None:
        swapped = "; are the two files swapped?" if "PRIVATE KEY-----" in text else ""
        raise CertificateFileError(f"{cert} holds no certificate{swapped}", is_key=False)
    key_text = text if key is None else _read(key, is_key=True)
    file = key or cert
    if "PRIVATE KEY-----" not in key_text:
        remedy = "" if key else "; name the file with its key"
        raise CertificateFileError(f"{file} holds no private key{remedy}", is_key=True)
    if "ENCRYPTED" in key_text:
        remedy = f"write it without one: openssl pkey -in {file} -out NEW"
        raise CertificateFileError(f"the key in {file} has a password; {remedy}", is_key=True)
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise CertificateFileError(f"the key in {file} is not that of {cert}", is_key=True) from None
        raise CertificateFileError(f"{cert} and {file} are not a certificate and its key", is_key=False) from None


def validity_problem(cert: Path, now: float) -> str | None:
    """Return that the first certificate of a file is not valid at a time, in seconds since 1970; None if it is."""
    found = _CERTIFICATE.search(cert.read_text("ascii", errors="replace"))
    times = None if found is None else _VALIDITY.search(ssl.PEM_cert_to_DER_cert(found[0]))
    if times is None:
        return None
    begin, end = (_seconds(times[index] or times[index + 1]) for index in (1, 3))
    if now > end:
        return f"the certificate in {cert} expired on {time.strftime('%Y-%m-%d', time.gmtime(end))}"
    if now < begin:
        return f"the certificate in {cert} is valid from {time.strftime('%Y-%m-%d', time.gmtime(begin))} on"
    return None


def _read(file: Path, *, is_key: bool) -> str:
    try:
        text = file.read_bytes().decode("ascii", errors="replace")
    except OSError as error:
        raise CertificateFileError(f"{file} cannot be read: {error.strerror}", is_key=is_key) from None
    if "-----BEGIN " not in text:
        what = "pkey" if is_key else "x509"
        remedy = f"if it is DER: openssl {what} -inform der -in {file} -out NEW"
        raise CertificateFileError(f"{file} is not in PEM form; {remedy}", is_key=is_key)
    return text


def _seconds(written: bytes) -> int:
    """Return a time of X.509 in seconds since 1970; one of two digits a year is of 1950 to 2049."""
    text = written.decode()
    if len(text) == len("YYMMDDhhmmss"):
        text = ("20" if text < "50" else "19") + text
    return timegm(time.strptime(text, "%Y%m%d%H%M%S"))
