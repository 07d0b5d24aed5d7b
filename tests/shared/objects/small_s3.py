"""As much of S3's protocol as a client of objects needs, in memory. Signatures are not checked."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    uploads: dict[str, dict[int, bytes]]
    before_read: Callable[[str, int], None]

    def log_message(self, *_: Any) -> None:
        pass

    def _asked(self) -> tuple[str, dict[str, str], bytes]:
        place = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(place.query, keep_blank_values=True).items()}
        size = int(self.headers.get("content-length") or 0)
        return unquote(place.path).partition("/")[2].partition("/")[2], query, self.rfile.read(size)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _found(self, key: str) -> dict[str, str]:
        data = self.objects[key]
        return {"etag": f'"{md5(data).hexdigest()}"', "last_modified": formatdate(usegmt=True)}

    def do_PUT(self) -> None:
        key, query, body = self._asked()
        if "uploadId" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, etag=f'"{md5(body).hexdigest()}"')
            return
        if self.headers.get("if-none-match") == "*" and key in self.objects:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.objects[key] = body
        self._answer(200, etag=self._found(key)["etag"])

    def do_POST(self) -> None:
        key, query, body = self._asked()
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for each in keys:
                self.objects.pop(each, None)
            text = f"<DeleteResult>{''.join(f'<Deleted><Key>{each}</Key></Deleted>' for each in keys)}</DeleteResult>"
        elif "uploads" in query:
            name = f"upload-{len(self.uploads)}"
            self.uploads[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        else:
            parts = self.uploads.pop(query["uploadId"])
            self.objects[key] = b"".join(parts[number] for number in sorted(parts))
            text = '<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
        self._answer(200, text.encode())

    def do_GET(self) -> None:
        key, query, _ = self._asked()
        if "list-type" in query:
            self._list(query)
            return
        self.before_read(key, self.client_address[1])
        if key not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data, found = self.objects[key], self._found(key)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
            if asked is None:
                self._answer(200, data, **found)
                return
            start, end = int(asked[1]), min(int(asked[2]), len(data) - 1)
            span = f"bytes {start}-{end}/{len(data)}"
            self._answer(206, data[start : end + 1], content_range=span, **found)

    def do_HEAD(self) -> None:
        key, _, _ = self._asked()
        if key not in self.objects:
            self._answer(404)
            return
        self.send_response(200)
        for name, value in self._found(key).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(self.objects[key])))
        self.end_headers()

    def do_DELETE(self) -> None:
        key, _, _ = self._asked()
        self.objects.pop(key, None)
        self._answer(204)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        keys, prefixes = [], set()
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(prefixes)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
        self._answer(200, text.encode())


@contextlib.contextmanager
def small_s3(before_read: Callable[[str, int], None] = lambda key, port: None, port: int = 0) -> Iterator[str]:
    """Serve buckets until the block ends, on a free port unless one is given; yield the endpoint's URL.

    `before_read` is called with the key of what is read, and the port of who reads it, which gets it after that.
    """
    handler = type("Handler", (_Handler,), {"objects": {}, "uploads": {}, "before_read": staticmethod(before_read)})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
