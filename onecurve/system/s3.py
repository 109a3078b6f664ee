"""Reads and writes objects below a prefix of an S3 bucket, using boto3 with bounded waits.

The endpoint is AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. Credentials come from boto3's credential chain. Error
messages contain the operation, the address, and the store's error code and message (redacted).
"""

import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from onecurve.system.files import ATTEMPTS, BACKOFF_S
from onecurve.system.output import log
from onecurve.system.text import redacted
from onecurve.system.threads import run_with_heartbeat, start_daemon

if TYPE_CHECKING:  # at runtime, the import is lazy because it takes a second
    from botocore.client import BaseClient

# With ATTEMPTS requests and botocore's waits between the requests, an operation without an answer ends within
# 102 s.
CONNECT_S = 5  # seconds until timeout, for each address of the endpoint
READ_S = 15  # seconds without data after which a request, or a part of an answer, counts as lost
PROBE_S = 20
PART_BYTES = 16 * 2**20  # part size for downloads and uploads; smaller files are uploaded in one request
FIRST_BYTES = 2**18  # size of a stream's first piece, which may be all that the reader needs
STREAMS = 4  # number of connections for one upload or download

NOT_CONDITIONAL = (
    "warning: this S3 store does not support conditional writes (If-None-Match). Two runs that start at the"
    " same moment with the same prefix can overwrite each other."
)
CHECKSUMS_SENT = "S3: this store requires a checksum of each object. Further requests include it."
CHECK_CONNECTION = "Check AWS_ENDPOINT_URL, the network, and firewalls or security groups"


class StoreError(ValueError):
    """Error from the store, with a one-line message that explains problem, address and remedy."""


class WrongSize(StoreError):
    """Raised when an object is missing or does not have the expected size."""


class ObjectStore:
    """Prefix of an S3 bucket, `s3://bucket/prefix`.

    This class is thread-safe. Each process creates a separate client at its first request. All keys are
    relative to the prefix. After retries, every method may raise StoreError.

    Raises:
        ValueError: If the URL is not s3://bucket[/prefix].
    """

    def __init__(self, url: str):
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}", bucket):
            quoted = "the text" if "@" in url else repr(url)  # the URL might be s3://key:secret@bucket
            raise ValueError(
                f"{quoted} is not an s3://bucket/prefix URL with a bucket name of 3 to 63 characters"
            )
        if prefix and not _is_plain(prefix):
            raise ValueError(
                f"{url!r}: the prefix must consist of names separated by single slashes, none of them . or .."
            )
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._conditional = True  # set to False once the store refuses a conditional write
        self._has_checksums = False  # set to True once the store requires checksums
        self._endpoint = "the store"  # replaced by the endpoint's address once there is a client
        # Keyed by pid, because forked processes must not share connections
        self._clients: dict[int, BaseClient] = {}
        self._secrets: tuple[str, ...] = ()  # credentials of the newest client

    def probe(self) -> None:
        """Write, list, read and delete a small object with a random name, within PROBE_S seconds.

        This method logs a warning if the store does not support conditional writes. Some stores accept
        conditional writes but ignore the condition.
        """
        end_s = time.monotonic() + PROBE_S

        def check_time() -> None:
            if time.monotonic() > end_s:
                raise StoreError(
                    f"{self.url}: no answer from {self._endpoint} within {PROBE_S} s. {CHECK_CONNECTION}"
                )

        run_with_heartbeat(self._probe, check_time)

    def _probe(self) -> None:
        key, content = f".probe-{secrets.token_hex(8)}/object", secrets.token_bytes(16)
        self.write(key, content)
        try:
            self.list(key)
            if self.read(key) != content:
                raise StoreError(
                    f"{self.url}: the content of an object changed between write and read. Use another store"
                )
            if self.create(key, b"must not replace it"):
                self._warn_not_conditional()
        finally:
            self.delete([key])

    def list(self, under: str = "") -> list[str]:
        """Return all keys that start with `under`, in sorted order, without keys that _at() refuses.

        Web consoles create keys that end in `/` for folders. Some tools create keys with `/..`, which is
        unsafe in a path.
        """
        with self._explained(f"listing {under or 'the prefix'}"):
            paginator = self._client().get_paginator("list_objects_v2")
            pages = paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + under)
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return sorted(filter(_is_plain, (key.removeprefix(self._prefix) for key in keys)))

    def read(self, key: str, limit: int = 2**20) -> bytes | None:
        """Return the content of a small object, or None if it does not exist.

        Raises:
            StoreError: If the object has more than `limit` bytes.
        """
        with self._explained(f"reading {key}", absent_is_fine=True):
            return self._body(key, limit)
        return None

    def write(self, key: str, content: bytes) -> None:
        """Write a small object. Replaces an existing object."""
        with self._explained(f"writing {key}"):
            self._put(Body=content, **self._at(key))

    def _put(self, **request: Any) -> None:
        """Write an object. Repeat the write with a checksum if the store requires one (for retention)."""
        try:
            self._client().put_object(**request)
        except Exception as error:
            if not self._begins_checksums(error):
                raise
            self._client().put_object(**request)

    def _begins_checksums(self, error: Exception) -> bool:
        """Return True if the store's answer requires a checksum. Later requests then include checksums."""
        code, status, message = _facts(error)
        if self._has_checksums or status != 400 or not re.search("md5|checksum|digest", code + message, re.I):
            return False
        log.info(CHECKSUMS_SENT)
        self._has_checksums = True
        self._clients.clear()
        return True

    def create(self, key: str, content: bytes) -> bool:
        """Create a small object. Return False if the object exists and this call did not write it.

        If a request was repeated because its answer was lost, an object with the same content counts as
        written by this call. Therefore, the content should be unique to the writer, for example a random id.
        On a store without conditional writes, the method first checks whether the object exists, then writes
        it, and logs a warning once.
        """
        for attempt in range(ATTEMPTS if self._conditional else 0):
            time.sleep(BACKOFF_S * attempt)
            with self._explained(f"creating {key}"):
                client = self._client()
                try:
                    self._put(**self._at(key), Body=content, IfNoneMatch="*")
                    return True
                except client.exceptions.ClientError as error:
                    code, status, _ = _facts(error)
                    if status == 412:  # the object exists
                        repeated = error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
                        return repeated and self.read(key, max(len(content), 2**20)) == content
                    if status == 501 or (status == 400 and code in ("InvalidArgument", "InvalidRequest")):
                        self._warn_not_conditional()
                        break
                    if status != 409:  # 409 means a concurrent write, which may still fail
                        raise
        if self._conditional or self.size_and_etag(key) is not None:
            return False
        self.write(key, content)
        return True

    def _warn_not_conditional(self) -> None:
        if self._conditional:
            log.warning(NOT_CONDITIONAL)
        self._conditional = False

    def upload(self, path: Path, key: str) -> None:
        """Upload a file. A file larger than PART_BYTES is uploaded in parts.

        A failed upload leaves no parts behind, unless the store can't be reached to remove the parts.

        Raises:
            OSError: If the file can't be read.
        """
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=PART_BYTES + 1,
            multipart_chunksize=PART_BYTES,
            max_concurrency=STREAMS,
            preferred_transfer_client="classic",  # boto3's CRT client ignores the endpoint
        )
        with self._explained(f"uploading {key}"):
            for attempt in range(3):
                client = self._client()
                try:
                    with create_transfer_manager(client, config) as manager:
                        manager.upload(str(path), *self._at(key).values()).result()
                    return
                except client.exceptions.ClientError as error:
                    # NoSuchUpload: the answer to the last request was lost, and the repeated request found no
                    # upload to complete. The stored object may be this file or an older version of it.
                    is_lost = isinstance(error, client.exceptions.NoSuchUpload) and attempt == 0
                    if not (is_lost or self._begins_checksums(error)):
                        raise

    def download(self, key: str, path: Path, size: int, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Download an object of `size` bytes to `path`. After an error, `path` does not exist.

        Args:
            heartbeat: Function that is called at least every second in the calling thread. An exception in
                this function ends the download.

        Raises:
            OSError: If the file can't be written.
        """

        def work() -> None:
            current = self.size_and_etag(key)
            if current is None or current[0] != size:
                fault = "does not exist" if current is None else f"has {current[0]:,} bytes"
                raise WrongSize(
                    f"{self.url}/{key} {fault}, but {size:,} bytes are expected. Use another copy"
                )
            for piece in self.stream(key, size, current[1]):
                # This write fails once the file is closed, which ends the download if the caller has
                # returned.
                file.write(piece)

        try:
            with open(path, "wb") as file:
                run_with_heartbeat(work, heartbeat)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def size_and_etag(self, key: str) -> tuple[int, str | None] | None:
        """Return the object's size in bytes and its ETag, or None if the object does not exist.

        The ETag changes when the object is replaced.
        """
        with self._explained(f"looking for {key}", absent_is_fine=True):
            answer = self._client().head_object(**self._at(key))
            return answer["ContentLength"], answer.get("ETag")
        return None

    def stream(self, key: str, size: int, etag: str | None, start: int = 0) -> Iterator[bytes]:
        """Yield the object's bytes from `start` on: first a small piece, then pieces of PART_BYTES.

        Up to STREAMS pieces are prefetched. Each piece is requested up to ATTEMPTS times.
        """
        # s3transfer is not used, because it can't yield bytes and repeats botocore's retries five times.
        pending: deque[Future[bytes]] = deque()
        begins = [start, *range(start + FIRST_BYTES, size, PART_BYTES)] if start < size else []
        for number, (begin, end) in enumerate(zip(begins, [*begins[1:], size], strict=False)):
            pending.append(start_daemon(partial(self._piece, key, begin, end, etag)))
            if number == 0 or len(pending) == STREAMS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _piece(self, key: str, begin: int, end: int, etag: str | None) -> bytes:
        condition = {"IfMatch": etag} if etag else {}
        with self._explained(f"reading {key}"):
            return self._body(key, end - begin, Range=f"bytes={begin}-{end - 1}", **condition)

    def _body(self, key: str, limit: int, **request: str) -> bytes:
        """Read an object or a byte range. Repeat the request up to ATTEMPTS times if connections break."""
        for attempt in range(ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
            answer = self._client().get_object(**self._at(key), **request)
            if answer["ContentLength"] > limit:
                answer["Body"].close()
                raise StoreError(
                    f"{self.url}/{key} has {answer['ContentLength']:,} bytes, but at most {limit:,} are"
                    " expected. The object was replaced, or the store ignores ranges"
                )
            try:
                return answer["Body"].read()
            except Exception:  # botocore or urllib3 raises various errors if the connection is lost or silent
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects one by one, because some stores require Content-MD5 for bulk requests.

        Missing objects are ignored.
        """
        for key in keys:
            with self._explained(f"deleting {key}", absent_is_fine=True):
                self._client().delete_object(**self._at(key))

    def _at(self, key: str) -> dict[str, str]:
        """Return boto3's arguments for an object. Raise StoreError for a folder or an unsafe key."""
        if not _is_plain(key):
            raise StoreError(
                f"{self.url}: {key!r} is not a key of names separated by single slashes, none of them . or .."
            )
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _client(self) -> "BaseClient":
        """Return this process's client. If two threads each create a client, one client is dropped."""
        client = self._clients.get(os.getpid())
        if client is None:
            client, self._secrets = _connect(self._has_checksums)
            self._clients[os.getpid()] = client
            self._endpoint = client.meta.endpoint_url.partition("?")[0]
        return client

    @contextmanager
    def _explained(self, doing: str, absent_is_fine: bool = False) -> Iterator[None]:
        """Convert boto3's errors within the context to StoreErrors."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            if absent_is_fine and _facts(error)[0] in ("NoSuchKey", "NotFound", "404"):
                return
            reason = _explanation(error, self._endpoint, self._secrets)
            # A new client reads the credentials again and starts with a full retry quota.
            self._clients.pop(os.getpid(), None)
            # Don't use `from error`, because the traceback may show the output of credential helpers.
            raise StoreError(f"{doing} at {self.url} failed: {reason}") from None


def _is_plain(key: str) -> bool:
    """Return True if a key has at most 1,024 characters, single slashes, and no parts named . or .. ."""
    names = key.split("/")
    return len(key) <= 1024 and key.isprintable() and all(name not in ("", ".", "..") for name in names)


def _connect(has_checksums: bool) -> tuple["BaseClient", tuple[str, ...]]:
    """Return a client and its credentials. The client uses a new session, so that processes share nothing.

    boto3's environment variables override our defaults.
    """
    import boto3
    from botocore.config import Config

    # Many stores refuse the trailing checksums that boto3 sends by default.
    settings: dict[str, Any] = {
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    options = {name[4:].lower(): value for name, value in settings.items() if name not in os.environ}
    if has_checksums:
        options["request_checksum_calculation"] = "when_supported"
    retries: dict[str, Any] = {"mode": os.environ.get("AWS_RETRY_MODE", "standard")}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = ATTEMPTS
    config = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries=retries, **options)
    session = boto3.session.Session()
    # Requests can't be signed without a region. AWS redirects requests to the right region, and other stores
    # accept any region.
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    try:
        client = session.client("s3", region_name=region, config=config)
    except ValueError:  # the message quotes the URL, which may contain a password
        raise StoreError(
            "AWS_ENDPOINT_URL or the region is malformed. Write the URL as https://host[:port]"
        ) from None
    if "@" in urlsplit(client.meta.endpoint_url).netloc:
        raise StoreError(
            "AWS_ENDPOINT_URL contains a user name or password. Set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY instead"
        )
    credentials = session.get_credentials()
    return client, tuple(filter(None, credentials.get_frozen_credentials()[:3])) if credentials else ()


def _facts(error: Exception) -> tuple[str, int, str]:
    """Return the code, HTTP status and message of the store's answer, or empty values without an answer."""
    answer = getattr(error, "response", None) or {}
    facts, status = answer.get("Error", {}), answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(facts.get("Code", "")), status, str(facts.get("Message", ""))


def _explanation(error: Exception, endpoint: str, secrets_: Iterable[str]) -> str:
    """Describe the store's answer, or why there was no answer, and the remedy."""
    import yaml
    from botocore import exceptions as known
    from urllib3.exceptions import HTTPError

    if isinstance(error, known.ClientError):
        code, status, message = _facts(error)
        remedies = yaml.safe_load(Path(__file__).with_name("s3_remedies.yaml").read_text())
        remedy = next((f"; {text}" for codes, text in remedies.items() if code in codes.split()), "")
        if not remedy and status >= 500:
            remedy = f"; the store failed or was busy in all {ATTEMPTS} attempts. Try again later"
        return f"{redacted(code, secrets_)} ({status}): {redacted(message, secrets_)}{remedy}"
    name = type(error).__name__
    if isinstance(error, known.NoCredentialsError):
        return (
            "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or"
            " run on a machine with a role that provides them"
        )
    if isinstance(error, known.SSLError):
        return f"the certificate of {endpoint} is not trusted. Set AWS_CA_BUNDLE, or correct the address"
    if isinstance(error, known.ProxyConnectionError):
        variable = f"{urlsplit(endpoint).scheme.upper()}_PROXY"
        proxy = redacted(str(error.kwargs.get("proxy_url", "")), secrets_)
        return f"the proxy {proxy} does not answer. Correct or unset {variable}, or add the store to NO_PROXY"
    lost = (known.ConnectionError, known.HTTPClientError, known.IncompleteReadError, HTTPError)
    if isinstance(error, lost):
        reason = redacted(str(getattr(error, "kwargs", {}).get("error", "")).rpartition(": ")[2], secrets_)
        cause = f"{name}: {reason}" if reason else name
        return f"no complete answer from {endpoint} in {ATTEMPTS} attempts ({cause}). {CHECK_CONNECTION}"
    return f"the AWS credentials or configuration could not be used ({name}). Test them with `aws s3 ls`"
