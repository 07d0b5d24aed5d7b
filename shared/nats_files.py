"""The files by which we and NATS authenticate each other: credentials, NKey seeds, certificates.

We log in by the first of these that is given: the credentials file or the NKey seed file (one of them at most), the
user and password, the user and password in the URL. TLS is required as soon as one URL begins with `tls://` or a
certificate is named: then a server that offers clear text is refused before anything is sent to it.
"""

from __future__ import annotations

import importlib.util
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.certificate_files import CertificateFileError, load_certificate
from shared.config import setting, variable_name
from shared.errors import ConfigError

_CREDENTIALS_MARKS = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")


@dataclass(frozen=True, slots=True)
class NatsFiles:
    """Settings that every process with a connection to NATS shares."""

    nats_creds_file: Path | None = setting(
        None, "Credentials file (JWT and NKey) of the NATS user; wins over user and password."
    )
    nats_nkey_seed_file: Path | None = setting(
        None, "File with the NKey seed (SU...) of the NATS user; wins over user and password."
    )
    nats_ca_file: Path | None = setting(
        None, "Certificates (PEM) that NATS servers are trusted by, instead of the system's; requires TLS."
    )
    nats_cert_file: Path | None = setting(
        None, "Our certificate (PEM) for NATS servers that ask for one; requires TLS."
    )
    nats_key_file: Path | None = setting(None, "Key (PEM) of our certificate, unless it is in the same file.")


def is_tls_required(url: str, files: NatsFiles) -> bool:
    """Return whether a connection may only be made with TLS."""
    has_scheme = any(part.strip().startswith("tls://") for part in url.split(","))
    certificates = (files.nats_ca_file, files.nats_cert_file, files.nats_key_file)
    return has_scheme or any(file is not None for file in certificates)


def identity_options(files: NatsFiles) -> dict[str, Any]:
    """Return the NATS client's options for logging in by a file, if one is given; `ConfigError` if it is of no use."""
    creds, seed = files.nats_creds_file, files.nats_nkey_seed_file
    if creds is None and seed is None:
        return {}
    if creds is not None and seed is not None:
        raise ConfigError(variable_name("nats_creds_file"), "give this or HEADRACE_NATS_NKEY_SEED_FILE, not both")
    variable = variable_name("nats_creds_file" if creds is not None else "nats_nkey_seed_file")
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError(variable, "needs the package nkeys: `pip install 'headrace[nkeys]'`")
    if creds is not None:
        if any(mark not in _read(variable, creds) for mark in _CREDENTIALS_MARKS):
            raise ConfigError(variable, f"{creds} is not a NATS credentials file with a JWT and a seed")
        return {"user_credentials": str(creds)}
    assert seed is not None
    _check_seed(variable, seed)
    return {"nkeys_seed": str(seed)}


def tls_context(files: NatsFiles) -> ssl.SSLContext:
    """Return the TLS context: whom we trust, our certificate, a check of the host; `ConfigError` for a bad file."""
    context = ssl.create_default_context()
    ca, cert, key = files.nats_ca_file, files.nats_cert_file, files.nats_key_file
    if ca is not None:
        variable = variable_name("nats_ca_file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=_read(variable, ca).decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError):
            raise ConfigError(variable, f"{ca} holds no certificates in PEM form") from None
    if cert is not None:
        try:
            load_certificate(context, cert, key)
        except CertificateFileError as error:
            named = "nats_key_file" if error.is_key else "nats_cert_file"
            raise ConfigError(variable_name(named), str(error)) from None
    elif key is not None:
        raise ConfigError(variable_name("nats_key_file"), "needs HEADRACE_NATS_CERT_FILE beside it")
    return context


def _check_seed(variable: str, file: Path) -> None:
    import nkeys

    try:
        key = nkeys.from_seed(bytearray(_read(variable, file).strip()))
    except (nkeys.NkeysError, ValueError):
        raise ConfigError(variable, f"{file} does not hold an NKey seed (SU and 56 more letters and digits)") from None
    is_user = key.public_key.startswith(b"U")
    key.wipe()
    if not is_user:
        raise ConfigError(variable, f"{file} holds the seed of another kind than a user's; one begins with SU")


def _read(variable: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(variable, f"{file} cannot be read: {error.strerror}") from error
