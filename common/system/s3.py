"""One prefix of an S3 bucket, through boto3, with bounded waits.

The endpoint is AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, and credentials come from boto3's own chain. Errors
name the operation, the address, and the store's redacted code and message.
"""

import os
import queue
import random
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from common.system.redaction import redacted
from common.system.threads import run_all_with_heartbeat, run_with_heartbeat, start_daemon

if TYPE_CHECKING:  # imported where it is needed: it takes a second
    from botocore.client import BaseClient
    from botocore.exceptions import ClientError

CONNECT_S = 5  # per address of the endpoint's name
READ_S = 15  # silence after which a request, or a part of an answer, counts as lost
ATTEMPTS = 4
# 102 s, the maximum time of a request without an answer: all attempts, and the waits between them (1 + 2 +
# 4 s after SlowDown, and 5 s more each if the store asks for it). Reads, uploads and downloads are several
# requests: they end at most 2 * REQUEST_BOUND_S + READ_S after their last byte went through.
REQUEST_BOUND_S = ATTEMPTS * (CONNECT_S + READ_S) + 22
PROBE_S = 20

PART_BYTES = 16 * 2**20  # larger uploads are multipart; also the unit of downloads
STREAMS = 4  # connections of one upload or download
ERROR_BYTES = 2**16  # read of an error's body
ANSWER_BYTES = 2**24  # limit of an answer other than an object; a page of 1,000 keys has at most 4 MiB
LIST_PAGES = 5_000
LIST_KEYS = 500_000
CHUNK_BYTES = 2**18  # of a download, between checks of `stop`

NOT_CONDITIONAL = (
    "S3: this store has no conditional writes (If-None-Match): two runs that start at the same moment in the"
    " same place are not kept apart"
)
CHECK_THE_WAY = "check AWS_ENDPOINT_URL, the network, and the firewall or security group between"


class StoreError(ValueError):
    """An error of the store in one line: what went wrong, where, and what to do."""


class WrongSize(StoreError):
    """Raised when an object is absent, or does not have the expected size."""


class ObjectStore:
    """One prefix of an S3 bucket, `s3://bucket/prefix`. Thread-safe; each process creates its own client.

    All keys are relative to the prefix. Every method raises StoreError, after retries. A request without an
    answer ends within REQUEST_BOUND_S.
    """

    def __init__(self, url: str):
        """ValueError for anything but an s3://bucket[/prefix] url. Sends no request yet."""
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}", bucket):
            shown = "that" if "@" in url else repr(url)  # it might be s3://key:secret@bucket
            raise ValueError(
                f"{shown} is no s3://bucket/prefix url with a bucket's name of 3 to 63 characters"
            )
        if prefix and not _is_plain(prefix):
            raise ValueError(f"{url!r}: the prefix must be names with single slashes between, none . or ..")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._conditional = True  # until the store refuses a conditional write
        self._endpoint = "the store"  # its address, once there is a client
        self._clients: dict[int, BaseClient] = {}  # by pid, as a forked process must not share connections
        self._secrets: tuple[str, ...] = ()  # the credentials of the newest client

    def probe(self) -> None:
        """Writes, lists, reads and deletes a small object with a random name, within PROBE_S.

        Prints a warning if the store has no conditional writes; some accept them and ignore the condition.
        """
        end_s = time.monotonic() + PROBE_S

        def beat() -> None:
            if time.monotonic() > end_s:
                raise StoreError(
                    f"{self.url}: no answer from {self._endpoint} within {PROBE_S} s: {CHECK_THE_WAY}"
                )

        run_with_heartbeat(self._probe, beat)

    def _probe(self) -> None:
        folder = f".probe-{secrets.token_hex(8)}"
        key, content = f"{folder}/object", secrets.token_bytes(16)
        self.write(key, content)
        try:
            self.list(folder)
            if self.read(key) != content:
                raise StoreError(
                    f"{self.url}: an object was read back with another content: use another store"
                )
            if self.create(key, b"must not replace it"):
                self._not_conditional()
        except BaseException:
            with suppress(StoreError):
                self.delete([key])
            raise
        self.delete([key])

    def list(self, under: str = "") -> list[str]:
        """All keys that start with `under`, sorted, without keys that _key() refuses.

        Web consoles create keys named `.../` for folders; some tools create `/..`, unsafe in a path.
        """
        start = self._prefix + under
        keys: list[str] = []
        with self._explained(f"listing {under or 'the prefix'}"):
            for number, page in enumerate(self._pages(start)):
                found = [item["Key"] for item in page.get("Contents", ())]
                found = [key.removeprefix(self._prefix) for key in found if key.startswith(start)]
                keys += filter(_is_plain, found)
                if number >= LIST_PAGES or len(keys) > LIST_KEYS:
                    raise self._endless(f"more than {LIST_KEYS:,} keys, or {LIST_PAGES:,} pages")
        return sorted(keys)

    def _pages(self, start: str) -> Iterator[dict[str, Any]]:
        from botocore.exceptions import PaginationError

        paginator = self._client().get_paginator("list_objects_v2")
        try:
            yield from paginator.paginate(Bucket=self._bucket, Prefix=start)
        except PaginationError:
            raise self._endless("the same continuation token twice") from None

    def _endless(self, why: str) -> StoreError:
        return StoreError(f"the list of {self.url} does not end: it has {why}; use a prefix of its own")

    def read(self, key: str, limit: int = 2**20) -> bytes | None:
        """The content of a small object; None when absent. StoreError above `limit` bytes."""
        found = self._head(key)
        if found is None:
            return None
        size = found["ContentLength"]
        if size > limit:
            raise StoreError(
                f"{self.url}/{key} has {size:,} bytes where at most {limit:,} are expected: it is not what"
                " was written there; remove it, or use another prefix"
            )
        return b"".join(self._chunks(key, 0, size, found.get("ETag"), threading.Event()))

    def write(self, key: str, content: bytes) -> None:
        """Writes a small object, replacing an existing one."""
        with self._explained(f"writing {key}"):
            self._client().put_object(Bucket=self._bucket, Key=self._key(key), Body=content)

    def create(self, key: str, content: bytes) -> bool:
        """Writes a small object unless it exists. False if it exists and this call did not write it.

        After a request that was repeated because its answer was lost, an object with this content counts as
        written by it: so the content should be unique to the writer (a random id). On a store without
        conditional writes it checks first and then writes, and prints a warning once.
        """
        for attempt in range(ATTEMPTS if self._conditional else 0):
            time.sleep(_backoff_s(attempt))
            answer, repeated = self._put_if_absent(key, content)
            if answer == "made":
                return True
            if answer == "exists":
                return repeated and self.read(key, max(len(content), 2**20)) == content
            if answer == "refused":
                self._not_conditional()
                break
            # A conflict: another writer's request is in progress, and may still fail.
        if self._conditional or self._head(key) is not None:
            return False
        self.write(key, content)
        return True

    def _put_if_absent(self, key: str, content: bytes) -> tuple[str, bool]:
        """Tries one conditional write. Returns its outcome, and True if boto repeated the request.

        Outcomes: made, exists, conflict (a concurrent write), refused (no conditional writes here).
        """
        with self._explained(f"creating {key}"):
            client = self._client()
            try:
                client.put_object(Bucket=self._bucket, Key=self._key(key), Body=content, IfNoneMatch="*")
            except client.exceptions.ClientError as error:
                code, status, _ = _about(error)
                refused = status == 501 or (status == 400 and code in ("InvalidArgument", "InvalidRequest"))
                answer = {409: "conflict", 412: "exists"}.get(status, "refused" if refused else None)
                if answer is None:
                    raise
                return answer, error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
        return "made", False

    def _not_conditional(self) -> None:
        self._conditional = False
        _say_once(NOT_CONDITIONAL)

    def upload(self, path: Path, key: str) -> None:
        """Uploads a file, in parts above PART_BYTES. OSError when the file can't be read.

        A failed upload leaves no parts behind, unless the store can't be reached for removing them.
        """
        with self._explained(f"uploading {key}"):
            client = self._client()
            try:
                self._transfer(client, path, key)
            except client.exceptions.ClientError as error:
                if _about(error)[0] != "NoSuchUpload":
                    raise
                # The answer to the last request was lost, and its repetition found nothing to complete. The
                # object may be this file or an older one.
                self._transfer(client, path, key)

    def _transfer(self, client: "BaseClient", path: Path, key: str) -> None:
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=PART_BYTES + 1,
            multipart_chunksize=PART_BYTES,
            max_concurrency=STREAMS,
            preferred_transfer_client="classic",  # CRT, the other client, ignores the endpoint
        )
        with create_transfer_manager(client, config) as manager:
            manager.upload(str(path), self._bucket, self._key(key)).result()

    def download(self, key: str, path: Path, size: int, beat: Callable[[], None] = lambda: None) -> None:
        """Downloads an object of `size` bytes to `path` in ranges, and resumes after a lost connection.

        beat() is called at least every second in the calling thread; its exception ends the download. On an
        error nothing is left at `path`. OSError if it can't be written.
        """
        stop = threading.Event()
        try:
            found = run_with_heartbeat(lambda: self._head(key), beat)
            if found is None or found["ContentLength"] != size:
                there = "is not there" if found is None else f"has {found['ContentLength']:,} bytes"
                raise WrongSize(
                    f"{self.url}/{key} {there} where {size:,} bytes are expected: use another copy"
                )
            _reserve(path, size)
            ranges: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
            for start in range(0, size, PART_BYTES):
                ranges.put((start, min(start + PART_BYTES, size)))
            # Opened here, as a thread that outlives a failed download must not open a newer file at `path`.
            files = [open(path, "r+b") for _ in range(min(STREAMS, ranges.qsize()))]  # noqa: SIM115
            fetch = partial(self._fetch, key, found.get("ETag"), ranges, stop)
            run_all_with_heartbeat([partial(fetch, file) for file in files], beat)
        except BaseException:
            stop.set()
            path.unlink(missing_ok=True)
            raise

    def size_and_etag(self, key: str) -> tuple[int, str | None] | None:
        """Size in bytes and ETag, which changes when the object is replaced; None if the object is absent."""
        found = self._head(key)
        return None if found is None else (found["ContentLength"], found.get("ETag"))

    def stream(self, key: str, size: int, etag: str | None, start: int = 0) -> Iterator[bytes]:
        """Yields the object's bytes from `start` on: a small piece, which may be enough, then pieces of
        PART_BYTES, of which STREAMS are prefetched.

        Close the iterator, or read it to its end. Each piece is tried ATTEMPTS times.
        """
        stop = threading.Event()
        coming: deque[Future[bytes]] = deque()
        first = min(CHUNK_BYTES, PART_BYTES)
        begins = [start, *range(start + first, size, PART_BYTES)] if start < size else []
        try:
            for number, (begin, end) in enumerate(zip(begins, [*begins[1:], size], strict=True)):
                coming.append(start_daemon(partial(b"".join, self._chunks(key, begin, end, etag, stop))))
                if number == 0 or len(coming) == STREAMS:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            stop.set()

    def _fetch(
        self,
        key: str,
        etag: str | None,
        ranges: "queue.SimpleQueue[tuple[int, int]]",
        stop: threading.Event,
        file: BinaryIO,
    ) -> None:
        """Writes ranges to their positions in `file` until none is left, and closes it."""
        with file, suppress(queue.Empty):
            while not stop.is_set():
                start, end = ranges.get_nowait()
                file.seek(start)
                for chunk in self._chunks(key, start, end, etag, stop):
                    file.write(chunk)

    def _chunks(
        self, key: str, start: int, end: int, etag: str | None, stop: threading.Event
    ) -> Iterator[bytes]:
        """Yields the object's bytes from start to end, or fewer after `stop`.

        It resumes after a lost connection, with ATTEMPTS requests in all.
        """
        same = {"IfMatch": etag} if etag else {}
        moved_s, attempt = time.monotonic(), 0
        while start < end and not stop.wait(_backoff_s(attempt)):
            with self._explained(f"reading {key}"):
                client, span = self._client(), f"{start}-{end - 1}"
                answer = client.get_object(
                    Bucket=self._bucket, Key=self._key(key), Range=f"bytes={span}", **same
                )
                if not answer.get("ContentRange", "").startswith(f"bytes {span}/"):
                    raise StoreError(f"{self.url}/{key}: the store ignores ranges: use another store")
                try:
                    for chunk in answer["Body"].iter_chunks(CHUNK_BYTES):
                        if stop.is_set():
                            return
                        if start + len(chunk) > end:
                            raise StoreError(f"{self.url}/{key}: the store sends more than the {end:,} bytes")
                        yield chunk
                        start, moved_s = start + len(chunk), time.monotonic()
                except _cuts():
                    attempt += 1
                    if attempt == ATTEMPTS or time.monotonic() > moved_s + REQUEST_BOUND_S:
                        raise

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes one by one, as some stores need Content-MD5 for bulk requests. Absent keys are fine."""
        for key in keys:
            with self._explained(f"deleting {key}"):
                client = self._client()
                with _absent_is_fine(client):
                    client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def _head(self, key: str) -> dict[str, Any] | None:
        """The object's ContentLength and ETag, among others; None when absent."""
        with self._explained(f"looking for {key}"):
            client = self._client()
            with _absent_is_fine(client):
                return client.head_object(Bucket=self._bucket, Key=self._key(key))
        return None

    def _key(self, key: str) -> str:
        if not _is_plain(key):
            raise StoreError(
                f"{self.url}: {key!r} is no key: names with single slashes between, none . or .."
            )
        return self._prefix + key

    def _client(self) -> "BaseClient":
        """This process's client. Two threads may both create one; dropping one is harmless."""
        client = self._clients.get(os.getpid())
        if client is None:
            client, self._secrets = _connect()
            self._clients[os.getpid()] = client
            self._endpoint = client.meta.endpoint_url.partition("?")[0]
        return client

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turns boto's errors into StoreErrors."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            if isinstance(error, ClientError):
                what = _client_error(error, self._secrets)
            else:
                what = _other_error(error, self._endpoint, self._secrets)
            # A new client reads the credentials again, and has a full budget of retries.
            self._clients.pop(os.getpid(), None)
            # Not `from error`, as its traceback may show the output of credential helpers.
            raise StoreError(f"{doing} at {self.url} failed: {what}") from None


def _is_plain(key: str) -> bool:
    """True for up to 1,024 characters of names with single slashes between, none of them . or .. ."""
    names = key.split("/")
    return len(key) <= 1024 and key.isprintable() and all(name not in ("", ".", "..") for name in names)


def _connect() -> tuple["BaseClient", tuple[str, ...]]:
    """A client in a new session, so that processes share nothing, and its credentials."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Many stores refuse the trailing checksums that boto3 sends by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session()
    # Requests can't be signed without a region. AWS redirects to the right one, other stores accept any.
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    try:
        client = session.client("s3", region_name=region, config=config)
    except ValueError:  # its text quotes the url, which may contain a password
        raise StoreError("AWS_ENDPOINT_URL, or the region, is malformed: write https://host[:port]") from None
    if "@" in urlsplit(client.meta.endpoint_url).netloc:
        raise StoreError(
            "AWS_ENDPOINT_URL holds a user name or password: give credentials in AWS_ACCESS_KEY_ID"
        )
    client.meta.events.register("before-send.s3", partial(_send, client._endpoint.http_session))
    credentials = session.get_credentials()
    return client, tuple(filter(None, credentials.get_frozen_credentials()[:3])) if credentials else ()


def _send(http_session: Any, request: Any, **_: Any) -> Any:
    """Sends the request and limits the answer's size, as botocore would read an error's body of any length.

    A hook of the event `before-send`. Returns botocore's answer with the body that was read.
    """
    from botocore.exceptions import HTTPClientError
    from urllib3.exceptions import HTTPError

    is_object, request.stream_output = request.stream_output, True  # botocore leaves the body to us
    answer = http_session.send(request)
    failed = answer.status_code >= 300
    if is_object and not failed:
        return answer
    limit = ERROR_BYTES if failed else ANSWER_BYTES
    try:
        answer._content = answer.raw.read(limit + 1)
    except HTTPError as error:
        raise HTTPClientError(error=error) from None  # botocore then repeats the request
    if len(answer._content) > limit:
        answer.raw.close()  # also closes the connection, on which the rest would arrive
        if not failed:
            raise StoreError(f"an answer of the store has more than {limit / 2**20:g} MiB: use another store")
        answer._content = answer._content[:limit]
    return answer


def _cuts() -> tuple[type[Exception], ...]:
    """The exceptions of reading an answer when the connection is lost or silent."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from urllib3.exceptions import HTTPError

    return HTTPClientError, IncompleteReadError, HTTPError


@contextmanager
def _absent_is_fine(client: "BaseClient") -> Iterator[None]:
    try:
        yield
    except client.exceptions.ClientError as error:
        if _about(error)[0] not in ("NoSuchKey", "NotFound", "404"):
            raise


def _about(error: "ClientError") -> tuple[str, int, str]:
    """Code, HTTP status and message of a ClientError."""
    about = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(about.get("Code", "")), status, str(about.get("Message", ""))


REMEDIES = {
    "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired": (
        "the credentials have expired: renew them, then start the same command again"
    ),
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity AuthFailure": (
        "the store does not accept these credentials: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"
        " AWS_SESSION_TOKEN, or the profile, and that they are of this endpoint"
    ),
    "NoSuchBucket": "there is no bucket of this name: create it, or correct the name",
    "AccessDenied AllAccessDisabled Forbidden 403": (
        "these credentials lack a permission: needed are s3:ListBucket on the bucket, and s3:GetObject,"
        " s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload below the prefix"
    ),
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect AuthorizationHeaderMalformed IncorrectEndpoint 301": (
        "the bucket is in another region: set AWS_DEFAULT_REGION to its"
    ),
    "PreconditionFailed 412": "the object was replaced while it was read: try again",
    "400": "the store gave no reason; expired credentials do that: renew them",
}


def _client_error(error: "ClientError", secrets_: Iterable[str]) -> str:
    """The store's answer, and what to do."""
    code, status, message = _about(error)
    remedy = next((text for codes, text in REMEDIES.items() if code in codes.split()), None)
    if remedy is None and status >= 500:
        remedy = f"the store failed or was busy in all {ATTEMPTS} attempts: try again later"
    return f"{redacted(code, secrets_)} ({status}): {redacted(message, secrets_)}" + (
        f"; {remedy}" if remedy else ""
    )


def _other_error(error: Exception, endpoint: str, secrets_: Iterable[str]) -> str:
    """Why there was no answer, and what to do."""
    from botocore import exceptions as known

    name = type(error).__name__
    if isinstance(error, known.NoCredentialsError):
        return (
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or"
            " run where a role gives them"
        )
    if isinstance(error, known.SSLError):
        return f"{endpoint} has a certificate that is not trusted: set AWS_CA_BUNDLE, or correct the address"
    if isinstance(error, (known.ConnectionError, *_cuts())):
        reason = str(getattr(error, "kwargs", {}).get("error", "")).rpartition(": ")[2]
        reason = redacted(reason, secrets_)
        why = f"{name}: {reason}" if reason else name
        return f"no whole answer from {endpoint} in {ATTEMPTS} attempts ({why}): {CHECK_THE_WAY}"
    if isinstance(error, known.ParamValidationError):
        return f"a name that S3 does not take ({name}): use letters, digits, - and _"
    return f"the credentials or the configuration of AWS could not be used ({name}): try `aws s3 ls`"


def _backoff_s(attempt: int) -> float:
    """The wait before an attempt; 0 before the first, number 0."""
    return random.uniform(0.1, 0.3) * 2**attempt if attempt else 0.0


def _reserve(path: Path, size: int) -> None:
    """Creates a file and allocates `size` bytes, so that a full disk is an error now, not after an hour."""
    with open(path, "wb") as file:
        if size and hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)


@cache
def _say_once(text: str) -> None:
    print(text, flush=True)
