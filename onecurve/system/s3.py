"""Reads and writes objects below a prefix in an S3 bucket, using boto3 with bounded waits.

AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL sets the endpoint. Credentials come from boto3's credential chain.
Error messages contain the operation, the address, and the redacted error code and message from the store.
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

from onecurve.system.files import BACKOFF_S, MAX_ATTEMPTS
from onecurve.system.output import log
from onecurve.system.text import redacted
from onecurve.system.threads import run_with_heartbeat, start_daemon

if TYPE_CHECKING:  # at runtime, functions import botocore lazily because the import takes a second
    from botocore.client import BaseClient

# An operation without a response ends within 102 s, after MAX_ATTEMPTS requests and botocore's waits between
# requests.
CONNECT_TIMEOUT_S = 5  # timeout in seconds for a connection to each of the endpoint's addresses
READ_TIMEOUT_S = 15  # timeout in seconds without data from the store
PROBE_MAX_S = 20  # timeout of probe() in seconds
PART_BYTES = 16 * 2**20  # part size of a multipart transfer; smaller files are uploaded in one request
FIRST_PART_BYTES = 2**18  # size of the first piece of a stream, because readers often need only the beginning
MAX_STREAMS = 4  # number of connections for one upload or download

NO_CONDITIONAL_WRITES = (
    "warning: this S3 store does not support conditional writes (If-None-Match). Do not start two runs with"
    " the same prefix at the same time, because the runs can overwrite each other."
)
CHECKSUMS_SENT = (
    "S3: this store requires a checksum for each object. Further requests will include checksums."
)
CHECK_CONNECTION = "Check AWS_ENDPOINT_URL, the network connection, and all firewalls and security groups"


class StoreError(ValueError):
    """Error from a store with a one-line message that contains the problem, the address and the remedy."""


class WrongSize(StoreError):
    """Error for an object that is missing or does not have the expected size."""


class ObjectStore:
    """Objects below a prefix in an S3 bucket, `s3://bucket/prefix`.

    This class is thread-safe. Each process creates a separate client for its first request. All keys are
    relative to the prefix. Every method may raise StoreError after all retries have failed.

    Raises:
        ValueError: If the URL does not have the form s3://bucket[/prefix].
    """

    def __init__(self, url: str):
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}", bucket):
            quoted = "the text" if "@" in url else repr(url)  # the URL might be s3://key:secret@bucket
            raise ValueError(
                f"{quoted} is not a valid S3 URL. Use the form s3://bucket/prefix with a bucket name of 3 to"
                " 63 characters"
            )
        if prefix and not _is_plain(prefix):
            raise ValueError(
                f"{url!r} does not contain a valid prefix. Use names separated by single slashes. The names ."
                " and .. are not allowed"
            )
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._supports_conditional_writes = True  # False after the store has refused a conditional write
        self._sends_checksums = False  # True after the store has required a checksum
        self._endpoint = "the store"  # endpoint address, set once a client exists
        # Clients by PID, because forked processes must not share connections
        self._clients: dict[int, BaseClient] = {}
        self._secrets: tuple[str, ...] = ()  # credentials of the newest client

    def probe(self) -> None:
        """Test the store by writing, listing, reading and deleting a small object within PROBE_MAX_S seconds.

        This method logs a warning if the store does not support conditional writes, or if it ignores the
        condition of such a write.
        """
        end_s = time.monotonic() + PROBE_MAX_S

        def check_time() -> None:
            if time.monotonic() > end_s:
                raise StoreError(
                    f"{self.url}: {self._endpoint} did not respond within {PROBE_MAX_S} s. {CHECK_CONNECTION}"
                )

        run_with_heartbeat(self._probe, check_time)

    def _probe(self) -> None:
        key, content = f".probe-{secrets.token_hex(8)}/object", secrets.token_bytes(16)
        self.write(key, content)
        try:
            self.list(key)
            if self.read(key) != content:
                raise StoreError(
                    f"{self.url}: the store returned different content than was written. Use a different"
                    " store"
                )
            if self.create(key, b"must not replace it"):
                self._warn_not_conditional()
        finally:
            self.delete([key])

    def list(self, under: str = "") -> list[str]:
        """Return the sorted keys that start with `under`, except for keys that _location() rejects.

        For example, web consoles create keys that end in `/` for folders, and some tools create keys with
        `/..`, which is unsafe in a file path.
        """
        with self._explained_errors(f"listing {under or 'the prefix'}"):
            paginator = self._client().get_paginator("list_objects_v2")
            pages = paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + under)
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return sorted(filter(_is_plain, (key.removeprefix(self._prefix) for key in keys)))

    def read(self, key: str, limit: int = 2**20) -> bytes | None:
        """Return the content of a small object, or None if the object does not exist.

        Raises:
            StoreError: If the object is larger than `limit` bytes.
        """
        with self._explained_errors(f"reading {key}", allows_absent=True):
            return self._read_body(key, limit)
        return None

    def write(self, key: str, content: bytes) -> None:
        """Create or replace a small object."""
        with self._explained_errors(f"writing {key}"):
            self._put_object(Body=content, **self._bucket_and_key(key))

    def _put_object(self, **request: Any) -> None:
        """Write an object, with a checksum if the store requires one (for example for object retention)."""
        try:
            self._client().put_object(**request)
        except Exception as error:
            if not self._enable_checksums(error):
                raise
            self._client().put_object(**request)

    def _enable_checksums(self, error: Exception) -> bool:
        """Return True if the error means that the store requires checksums. Later requests include them."""
        code, status, message = _response_facts(error)
        is_refusal = status == 400 and re.search("md5|checksum|digest", code + message, re.I)
        if self._sends_checksums or not is_refusal:
            return False
        log.info(CHECKSUMS_SENT)
        self._sends_checksums = True
        self._clients.clear()
        return True

    def create(self, key: str, content: bytes) -> bool:
        """Create a small object. Return False if the object already exists.

        The content should be unique to the writer, for example a random id. If botocore repeats a request
        because the response was lost, this method compares the content to find out whether the first request
        created the object. On a store without conditional writes, this method checks whether the object
        exists, writes it, and logs a warning once.
        """
        for attempt in range(MAX_ATTEMPTS if self._supports_conditional_writes else 0):
            time.sleep(BACKOFF_S * attempt)
            with self._explained_errors(f"creating {key}"):
                client = self._client()
                try:
                    self._put_object(**self._bucket_and_key(key), Body=content, IfNoneMatch="*")
                    return True
                except client.exceptions.ClientError as error:
                    code, status, _ = _response_facts(error)
                    if status == 412:  # the object exists
                        was_retried = error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
                        return was_retried and self.read(key, max(len(content), 2**20)) == content
                    if status == 501 or (status == 400 and code in ("InvalidArgument", "InvalidRequest")):
                        self._warn_not_conditional()
                        break
                    if status != 409:  # 409 means that a concurrent write is in progress and may still fail
                        raise
        if self._supports_conditional_writes or self.size_and_etag(key) is not None:
            return False
        self.write(key, content)
        return True

    def _warn_not_conditional(self) -> None:
        if self._supports_conditional_writes:
            log.warning(NO_CONDITIONAL_WRITES)
        self._supports_conditional_writes = False

    def upload(self, path: Path, key: str) -> None:
        """Upload a file. Files larger than PART_BYTES are sent as multipart uploads.

        After a failed upload, the uploaded parts are removed from the store unless the store is unreachable.

        Raises:
            OSError: If the file can't be read.
        """
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=PART_BYTES + 1,
            multipart_chunksize=PART_BYTES,
            max_concurrency=MAX_STREAMS,
            preferred_transfer_client="classic",  # because boto3's CRT client ignores the endpoint
        )
        with self._explained_errors(f"uploading {key}"):
            for attempt in range(3):
                client = self._client()
                try:
                    with create_transfer_manager(client, config) as manager:
                        manager.upload(str(path), *self._bucket_and_key(key).values()).result()
                    return
                except client.exceptions.ClientError as error:
                    # After NoSuchUpload, the stored object may be this file or an older version of it.
                    # The error means that the last request's response was lost, and that the repeated request
                    # found no upload to complete.
                    is_lost = isinstance(error, client.exceptions.NoSuchUpload) and attempt == 0
                    if not (is_lost or self._enable_checksums(error)):
                        raise

    def download(self, key: str, path: Path, size: int, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Download an object to a file. If the download fails, remove the file.

        Args:
            key: Key of the object.
            path: Path of the new file.
            size: Expected size of the object in bytes.
            heartbeat: Function called at least every second in the calling thread. An exception in this
                function ends the download.

        Raises:
            OSError: If the file can't be written.
        """

        def write_parts() -> None:
            size_and_tag = self.size_and_etag(key)
            if size_and_tag is None or size_and_tag[0] != size:
                fault = "does not exist" if size_and_tag is None else f"has {size_and_tag[0]:,} bytes"
                raise WrongSize(
                    f"{self.url}/{key} {fault}, but {size:,} bytes are expected. Use a different"
                    " copy of the data"
                )
            for part in self.stream(key, size, size_and_tag[1]):
                # Writing fails after the file is closed. This error ends the thread if the caller has
                # returned early.
                file.write(part)

        try:
            with open(path, "wb") as file:
                run_with_heartbeat(write_parts, heartbeat)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def size_and_etag(self, key: str) -> tuple[int, str | None] | None:
        """Return the object's size in bytes and its ETag, or None if the object does not exist.

        The ETag changes when the object is replaced.
        """
        with self._explained_errors(f"looking for {key}", allows_absent=True):
            response = self._client().head_object(**self._bucket_and_key(key))
            return response["ContentLength"], response.get("ETag")
        return None

    def stream(self, key: str, size: int, etag: str | None, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an object from `start` as a small first piece, followed by pieces of PART_BYTES.

        Up to MAX_STREAMS pieces are prefetched, and each piece is requested up to MAX_ATTEMPTS times.
        """
        # Don't use s3transfer, because it can't yield bytes and repeats botocore's retries five times.
        pending_parts: deque[Future[bytes]] = deque()
        part_starts = [start, *range(start + FIRST_PART_BYTES, size, PART_BYTES)] if start < size else []
        for index, (begin, end) in enumerate(zip(part_starts, [*part_starts[1:], size], strict=False)):
            pending_parts.append(start_daemon(partial(self._read_part, key, begin, end, etag)))
            if index == 0 or len(pending_parts) == MAX_STREAMS:
                yield pending_parts.popleft().result()
        while pending_parts:
            yield pending_parts.popleft().result()

    def _read_part(self, key: str, begin: int, end: int, etag: str | None) -> bytes:
        condition = {"IfMatch": etag} if etag else {}
        with self._explained_errors(f"reading {key}"):
            return self._read_body(key, end - begin, Range=f"bytes={begin}-{end - 1}", **condition)

    def _read_body(self, key: str, limit: int, **request: str) -> bytes:
        """Read an object or a byte range. Make up to MAX_ATTEMPTS requests if connections break."""
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
            reply = self._client().get_object(**self._bucket_and_key(key), **request)
            if reply["ContentLength"] > limit:
                reply["Body"].close()
                raise StoreError(
                    f"{self.url}/{key} has {reply['ContentLength']:,} bytes, but at most {limit:,} bytes are"
                    " expected. The object was replaced, or the store ignores byte ranges"
                )
            try:
                return reply["Body"].read()
            except Exception:  # botocore and urllib3 raise various errors for a lost or silent connection
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises an error")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Ignore missing objects.

        Each request deletes only one object, because some stores require Content-MD5 for bulk requests.
        """
        for key in keys:
            with self._explained_errors(f"deleting {key}", allows_absent=True):
                self._client().delete_object(**self._bucket_and_key(key))

    def _bucket_and_key(self, key: str) -> dict[str, str]:
        """Return the boto3 arguments that identify an object.

        Raise StoreError if the key is a folder or unsafe.
        """
        if not _is_plain(key):
            raise StoreError(
                f"{self.url}: {key!r} is not a valid key. Use names separated by single slashes. The names ."
                " and .. are not allowed"
            )
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _client(self) -> "BaseClient":
        """Return this process's client. If two threads each create a client, only one is kept."""
        client = self._clients.get(os.getpid())
        if client is None:
            client, self._secrets = _connect(self._sends_checksums)
            self._clients[os.getpid()] = client
            self._endpoint = client.meta.endpoint_url.partition("?")[0]
        return client

    @contextmanager
    def _explained_errors(self, operation: str, allows_absent: bool = False) -> Iterator[None]:
        """Convert boto3's errors in the context to StoreErrors with explanations."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            if allows_absent and _response_facts(error)[0] in ("NoSuchKey", "NotFound", "404"):
                return
            reason = _explain(error, self._endpoint, self._secrets)
            # A new client reads the credentials again and starts with a full retry quota.
            self._clients.pop(os.getpid(), None)
            # Don't chain the errors, because the traceback may show the output of credential helpers.
            raise StoreError(f"{operation} at {self.url} failed: {reason}") from None


def _is_plain(key: str) -> bool:
    """Return True if a key has at most 1,024 characters and consists of names other than . and .. ."""
    names = key.split("/")
    return len(key) <= 1024 and key.isprintable() and all(name not in ("", ".", "..") for name in names)


def _connect(has_checksums: bool) -> tuple["BaseClient", tuple[str, ...]]:
    """Return a client and its credentials.

    The client uses a new session, so that processes do not share connections. boto3's environment variables
    override the defaults in this function.
    """
    import boto3
    from botocore.config import Config

    # Many stores refuse the trailing checksums that boto3 sends by default.
    checksum_settings: dict[str, Any] = {
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    options = {name[4:].lower(): value for name, value in checksum_settings.items() if name not in os.environ}
    if has_checksums:
        options["request_checksum_calculation"] = "when_supported"
    retries: dict[str, Any] = {"mode": os.environ.get("AWS_RETRY_MODE", "standard")}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = MAX_ATTEMPTS
    options |= {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
    config = Config(retries=retries, **options)
    session = boto3.session.Session()
    # Requests can't be signed without a region. AWS redirects requests to the correct region, and other
    # stores accept any region.
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    try:
        client = session.client("s3", region_name=region, config=config)
    except ValueError:  # don't show the message, because the quoted URL may contain a password
        raise StoreError(
            "AWS_ENDPOINT_URL or the region is malformed. Use the form https://host[:port] for the URL"
        ) from None
    if "@" in urlsplit(client.meta.endpoint_url).netloc:
        raise StoreError(
            "AWS_ENDPOINT_URL contains a user name or password. Remove both from the URL, and set"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    credentials = session.get_credentials()
    return client, tuple(filter(None, credentials.get_frozen_credentials()[:3])) if credentials else ()


def _response_facts(error: Exception) -> tuple[str, int, str]:
    """Return the error code, HTTP status and message in the store's response, or ("", 0, "")."""
    response = getattr(error, "response", None) or {}
    error_details = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error_details.get("Code", "")), status, str(error_details.get("Message", ""))


def _explain(error: Exception, endpoint: str, secrets_: Iterable[str]) -> str:
    """Describe the store's response or the lost connection, and append the remedy."""
    import yaml
    from botocore import exceptions as boto_errors
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto_errors.ClientError):
        code, status, message = _response_facts(error)
        remedies = yaml.safe_load(Path(__file__).with_name("s3_remedies.yaml").read_text())
        remedy = next((known_remedy for codes, known_remedy in remedies.items() if code in codes.split()), "")
        if not remedy and status >= 500:
            remedy = f"the store failed or was busy in all {MAX_ATTEMPTS} attempts. Try again later"
        store_error = f"{redacted(code, secrets_)} ({status}): {redacted(message, secrets_)}"
        return f"{store_error}; {remedy}" if remedy else store_error
    error_name = type(error).__name__
    if isinstance(error, boto_errors.NoCredentialsError):
        return (
            "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, set AWS_PROFILE, or"
            " use a machine with a role that provides credentials"
        )
    if isinstance(error, boto_errors.SSLError):
        return (
            f"the TLS certificate of {endpoint} is not trusted. Set AWS_CA_BUNDLE to a file with trusted"
            " certificates, or correct the address"
        )
    if isinstance(error, boto_errors.ProxyConnectionError):
        variable = f"{urlsplit(endpoint).scheme.upper()}_PROXY"
        proxy = redacted(str(error.kwargs.get("proxy_url", "")), secrets_)
        return (
            f"the proxy {proxy} does not respond. Correct or unset {variable}, or add the store's host to"
            " NO_PROXY"
        )
    connection_errors = (
        boto_errors.ConnectionError,
        boto_errors.HTTPClientError,
        boto_errors.IncompleteReadError,
        HTTPError,
    )
    if isinstance(error, connection_errors):
        reason = redacted(str(getattr(error, "kwargs", {}).get("error", "")).rpartition(": ")[2], secrets_)
        error_cause = f"{error_name}: {reason}" if reason else error_name
        failure = f"{endpoint} did not send a complete response in {MAX_ATTEMPTS} attempts ({error_cause})"
        return f"{failure}. {CHECK_CONNECTION}"
    return (
        f"boto3 could not use the AWS credentials or configuration ({error_name}). Test them with `aws s3 ls`"
    )
