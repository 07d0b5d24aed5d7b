"""Files in a bucket of S3, or of a server that speaks its protocol, through the package `obstore`.

An object is uploaded in parts and appears with its last one. Credentials, region and endpoint come from the variables
that all clients of S3 read (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.objects.store import MissingObjectError, StoredObject, StoreError, check_key

_PART_BYTES = 8 << 20
# The last place where the package looks for credentials: the metadata server of a cloud, with those of the role.
_CREDENTIALS_OF_A_MACHINE = "://169.254.169.254/"

Result = TypeVar("Result")


def open_bucket(url: str, variable: str, **client_options: Any) -> tuple[Any, Any]:
    """Return obstore and its store of `s3://bucket/prefix`; `ConfigError` about `variable`."""
    place = urlsplit(url)
    if place.scheme != "s3" or not place.netloc or place.query or place.fragment or place.username:
        raise ConfigError(variable, f"{url!r} is not a bucket: write s3://BUCKET or s3://BUCKET/PREFIX")
    try:
        import obstore
        from obstore.store import S3Store as Bucket
    except ImportError:
        raise ConfigError(variable, "a bucket needs the package obstore: pip install 'headrace[s3]'") from None
    prefix = place.path.strip("/") or None
    # A server of one's own on a private network may speak HTTP.
    is_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {"allow_http": is_http, **client_options}
    return obstore, Bucket(place.netloc, prefix=prefix, client_options=options)


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


class S3Store:
    """A bucket, or what begins with a prefix in it."""

    is_local = False

    def __init__(self, url: str, variable: str = "HEADRACE_FILES") -> None:
        self.place = f"the bucket {url}"
        self._client, self._bucket = open_bucket(url, variable)

    async def create(self, key: str, data: bytes) -> None:
        """Put an object on the condition that there is none."""
        with contextlib.suppress(FileExistsError):
            await self._answered(self._client.put_async(self._bucket, check_key(key), data, mode="create"))

    async def check_room(self, num_bytes: int) -> None:
        """Do nothing: a bucket does not say how much it can hold."""

    async def writer(self, key: str) -> S3Writer:
        """Begin to upload an object."""
        return S3Writer(self, self._client.open_writer_async(self._bucket, check_key(key), buffer_size=_PART_BYTES))

    async def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Read a range of an object."""
        if num_bytes == 0:
            return b""
        size = (await self._answered(self._client.head_async(self._bucket, check_key(key))))["size"]
        end = size if num_bytes is None else min(size, start + num_bytes)
        if start >= end:
            return b""
        return bytes(await self._answered(self._client.get_range_async(self._bucket, key, start=start, end=end)))

    async def objects(self, folder: str) -> list[StoredObject]:
        """List what begins with the folder."""
        found = await self._answered(self._client.list(self._bucket, folder).collect_async())
        names = [(each["path"].removeprefix(f"{folder}/"), each) for each in found]
        return sorted(
            StoredObject(name, each["size"], each["last_modified"].timestamp())
            for name, each in names
            if "/" not in name
        )

    async def folders(self, folder: str = "") -> list[str]:
        """List the parts of keys that follow the folder."""
        found = await self._answered(self._client.list_with_delimiter_async(self._bucket, folder or None))
        return sorted(each.rpartition("/")[2] for each in found["common_prefixes"])

    async def delete(self, key: str) -> None:
        """Delete an object."""
        try:
            await self._answered(self._client.delete_async(self._bucket, check_key(key)))
        except MissingObjectError:
            return

    async def delete_folder(self, folder: str) -> None:
        """Delete what begins with the folder."""
        for each in await self.objects(folder):
            await self.delete(f"{folder}/{each.name}")

    async def close(self) -> None:
        """Do nothing: connections end with the object."""

    async def _answered(self, call: Awaitable[Result]) -> Result:
        try:
            with bucket_errors():
                return await call
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            raise MissingObjectError(f"{self.place} has no such object, or there is no such bucket") from error
        except OSError as error:
            raise StoreError(f"{self.place} cannot be used: {error}") from error


class S3Writer:
    """An upload in parts. Made by `S3Store.writer`; an uncommitted object never appears in the bucket."""

    def __init__(self, store: S3Store, upload: Any) -> None:
        self._store = store
        self._upload = upload

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        await self._store._answered(self._upload.write(data))

    async def commit(self) -> None:
        """Complete the upload."""
        await self._store._answered(self._upload.close())

    async def abort(self) -> None:
        """Let go of the upload; a bucket's own rule for incomplete uploads frees its parts."""
        self._upload = None
