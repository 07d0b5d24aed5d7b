"""Opens a bucket of S3, or of a server that speaks its protocol, through the package `obstore`.

Credentials, region and endpoint come from the variables that all clients of S3 read (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL`, ...).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shared.errors import ConfigError

# Where the package asks last for credentials: a machine in a cloud is told those of its role there.
_CREDENTIALS_OF_A_MACHINE = "://169.254.169.254/"


def open_bucket(url: str, variable: str, **client_options: Any) -> tuple[Any, Any]:
    """Return the package, and the bucket or what begins with a prefix in it, of `s3://bucket/prefix`.

    Raises:
        ConfigError: The URL is not an S3 URL, or obstore is not installed; names the setting `variable`.
    """
    place = urlsplit(url)
    if place.scheme != "s3" or not place.netloc or place.query or place.fragment or place.username:
        raise ConfigError(variable, f"{url!r} is not a bucket: write s3://BUCKET or s3://BUCKET/PREFIX")
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        raise ConfigError(variable, "a bucket needs the package obstore: pip install 'headrace[s3]'") from None
    prefix = place.path.strip("/") or None
    # A server of one's own on a private network may speak HTTP.
    is_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {"allow_http": is_http, **client_options}
    return obstore, S3Store(place.netloc, prefix=prefix, client_options=options)


@contextlib.contextmanager
def bucket_errors() -> Iterator[None]:
    """Turn errors of the package into `FileNotFoundError`, `FileExistsError` and other `OSError`s."""
    from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        reason = str(error).partition("\n")[0][:300]
        if _CREDENTIALS_OF_A_MACHINE in reason:
            reason = "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        elif "401 Unauthorized" in reason or "403 Forbidden" in reason:
            reason += "; does AWS_ACCESS_KEY_ID name credentials that may use it?"
        if isinstance(error, NotFoundError | FileNotFoundError):
            raise FileNotFoundError(reason) from None
        raise (FileExistsError if isinstance(error, AlreadyExistsError) else OSError)(reason) from None
