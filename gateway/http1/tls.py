"""TLS on the gateway's own ports: a certificate, and if wanted an authority that clients' certificates must come from.

Files are read once at start; a new certificate comes into force when the processes are replaced (SIGUSR1 with several).
"""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path

from shared.certificate_files import CertificateFileError, load_certificate, validity_problem
from shared.errors import ConfigError

CERT_VARIABLE = "HEADRACE_TLS_CERT_FILE"
KEY_VARIABLE = "HEADRACE_TLS_KEY_FILE"
CLIENT_CA_VARIABLE = "HEADRACE_TLS_CLIENT_CA_FILE"

_log = logging.getLogger(__name__)


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """Return the context of a server with this certificate; None where no file is given.

    Without `key`, the certificate's file contains it. Clients without a certificate of `client_ca` fail the handshake.

    Raises:
        ConfigError: A file cannot be used, or a key or authority is given without a certificate.
    """
    if cert is None:
        if key is not None or client_ca is not None:
            raise ConfigError(CERT_VARIABLE, "is required with HEADRACE_TLS_KEY_FILE or HEADRACE_TLS_CLIENT_CA_FILE")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        load_certificate(context, cert, key)
    except CertificateFileError as error:
        raise ConfigError(KEY_VARIABLE if error.is_key else CERT_VARIABLE, str(error)) from None
    if (problem := validity_problem(cert, time.time())) is not None:
        # A clock may be wrong, or the file be replaced before a client comes: it does not prevent the start.
        _log.warning("%s: clients refuse it", problem)
    if client_ca is not None:
        try:
            context.load_verify_locations(cafile=client_ca)
        except OSError as error:
            reason = "holds no certificates in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(CLIENT_CA_VARIABLE, f"{client_ca}: {reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
