"""Reads and writes objects below a prefix in an S3 bucket, using boto3 with bounded waits.

AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL sets the endpoint. Credentials come from boto3's credential chain.
Error messages contain the operation, the address, and the redacted error code and message from the store.
"""

import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from onecurve.system.files import BACKOFF_S, MAX_ATTEMPTS
from onecurve.system.output import log
from onecurve.system.text import redacted
from onecurve.system.threads import Heartbeat, run_with_heartbeat, start_daemon

if TYPE_CHECKING:  # at runtime, functions import botocore lazily because the import takes a second
    from botocore.client import BaseClient

ABSENT_ERROR_CODES = ("NoSuchKey", "NotFound", "404")  # codes of a missing object
# An operation without a response ends within 102 s, after MAX_ATTEMPTS requests and botocore's waits between
# requests.
CONNECT_TIMEOUT_S = 5  # timeout in seconds for a connection to each of the endpoint's addresses
READ_TIMEOUT_S = 15  # timeout in seconds without data from the store
PROBE_MAX_S = 20  # timeout of probe() in seconds
PART_BYTES = 16 * 2**20  # part size of a multipart transfer; smaller files are uploaded in one request
FIRST_PART_BYTES = 2**18  # size of the first part of a stream, because readers often need only the beginning
MAX_STREAMS = 4  # maximum number of connections for one upload or download
MAX_KEY_LENGTH = 1024  # maximum number of characters in a key
MAX_SMALL_BYTES = 2**20  # maximum size of an object that read() returns by default
UPLOAD_ATTEMPTS = 3  # one attempt, and one each after a lost response and a required checksum

NO_CONDITIONAL_WRITES = (
    "warning: this S3 store does not support conditional writes (If-None-Match)."
    " Do not start two runs with the same prefix at the same time, because the runs can overwrite each other."
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
            quoted_url = "the text" if "@" in url else repr(url)  # the URL might be s3://key:secret@bucket
            raise ValueError(
                f"{quoted_url} is not a valid S3 URL."
                " Use the form s3://bucket/prefix with a bucket name of 3 to 63 characters"
            )
        if prefix and not _is_valid_key(prefix):
            raise ValueError(
                f"{url!r} does not contain a valid prefix."
                " Use names separated by single slashes. The names . and .. are not allowed"
            )
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._key_prefix = f"{prefix}/" if prefix else ""  # precedes each key within the bucket
        self._supports_conditional_writes = True  # False after the store has refused a conditional write
        self._sends_checksums = False  # True after the store has required a checksum
        self._endpoint = "the store"  # endpoint address, set once a client exists
        # One client per process, because forked processes must not share connections
        self._client_by_pid: dict[int, BaseClient] = {}
        self._secrets: tuple[str, ...] = ()  # credentials of the newest client

    def probe(self) -> None:
        """Test the store by writing, listing, reading and deleting a small object within PROBE_MAX_S seconds.

        This method logs a warning if the store does not support conditional writes, or if it ignores the
        condition of such a write.
        """
        deadline_s = time.monotonic() + PROBE_MAX_S

        def check_deadline() -> None:
            if time.monotonic() > deadline_s:
                raise StoreError(
                    f"{self.url}: {self._endpoint} did not respond within {PROBE_MAX_S} s. {CHECK_CONNECTION}"
                )

        run_with_heartbeat(self._probe, check_deadline)

    def _probe(self) -> None:
        """Test the store with a small object under a random key, and delete the object."""
        probe_key, probe_content = f".probe-{secrets.token_hex(8)}/object", secrets.token_bytes(16)
        self.write(probe_key, probe_content)
        try:
            self.list(probe_key)
            if self.read(probe_key) != probe_content:
                raise StoreError(
                    f"{self.url}: the store returned different content than was written."
                    " Use a different store"
                )
            if self.create(probe_key, b"must not replace it"):  # True if the existing object was replaced
                self._disable_conditional_writes()
        finally:
            self.delete([probe_key])

    def list(self, key_start: str = "") -> list[str]:
        """Return the sorted keys that start with `key_start`, except for keys that _bucket_and_key() rejects.

        For example, web consoles create keys that end in `/` for folders, and some tools create keys with
        `/..`, which is unsafe in a file path.
        """
        with self._explained_errors(f"listing {key_start or 'the prefix'}"):
            paginator = self._client().get_paginator("list_objects_v2")
            pages = paginator.paginate(Bucket=self._bucket, Prefix=self._key_prefix + key_start)
            full_keys = [object_entry["Key"] for page in pages for object_entry in page.get("Contents", ())]
        relative_keys = (full_key.removeprefix(self._key_prefix) for full_key in full_keys)
        return sorted(filter(_is_valid_key, relative_keys))

    def read(self, key: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """Return the content of a small object, or None if the object does not exist.

        Raises:
            StoreError: If the object is larger than `max_bytes` bytes.
        """
        with self._explained_errors(f"reading {key}", allows_absent=True):
            return self._read_body(key, max_bytes)
        return None  # the object does not exist

    def write(self, key: str, content: bytes) -> None:
        """Create or replace a small object."""
        with self._explained_errors(f"writing {key}"):
            self._put_object(Body=content, **self._bucket_and_key(key))

    def _put_object(self, **put_request: Any) -> None:
        """Write an object, with a checksum if the store requires one (for example for object retention)."""
        try:
            self._client().put_object(**put_request)
        except Exception as put_error:
            if not self._enable_checksums_after(put_error):
                raise
            self._client().put_object(**put_request)

    def _enable_checksums_after(self, request_error: Exception) -> bool:
        """Include checksums in later requests if the error means that the store requires checksums.

        Returns:
            True if this call has enabled checksums.
        """
        error_code, http_status, error_message = _parse_error_response(request_error)
        mentions_checksum = re.search("md5|checksum|digest", error_code + error_message, re.I)
        requires_checksum = http_status == HTTPStatus.BAD_REQUEST and mentions_checksum
        if self._sends_checksums or not requires_checksum:
            return False
        log.info(CHECKSUMS_SENT)
        self._sends_checksums = True
        self._client_by_pid.clear()  # the next request creates a client that sends checksums
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
                s3_client = self._client()
                try:
                    self._put_object(**self._bucket_and_key(key), Body=content, IfNoneMatch="*")
                    return True  # this request created the object
                except s3_client.exceptions.ClientError as create_error:
                    error_code, http_status, _ = _parse_error_response(create_error)
                    if http_status == HTTPStatus.PRECONDITION_FAILED:  # the object exists
                        was_retried = create_error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
                        max_bytes = max(len(content), MAX_SMALL_BYTES)
                        return was_retried and self.read(key, max_bytes) == content
                    is_bad_request = http_status == HTTPStatus.BAD_REQUEST
                    is_refused = is_bad_request and error_code in ("InvalidArgument", "InvalidRequest")
                    if is_refused or http_status == HTTPStatus.NOT_IMPLEMENTED:
                        self._disable_conditional_writes()
                        break
                    # CONFLICT reports a concurrent write, which may still fail, so the loop tries again.
                    if http_status != HTTPStatus.CONFLICT:
                        raise
        if self._supports_conditional_writes or self.size_and_etag(key) is not None:
            return False  # another process created the object, or is creating it
        self.write(key, content)
        return True

    def _disable_conditional_writes(self) -> None:
        """Stop using conditional writes on this store, and log a warning once."""
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

        transfer_config = TransferConfig(
            multipart_threshold=PART_BYTES + 1,
            multipart_chunksize=PART_BYTES,
            max_concurrency=MAX_STREAMS,
            preferred_transfer_client="classic",  # because boto3's CRT client ignores the endpoint
        )
        with self._explained_errors(f"uploading {key}"):
            for attempt in range(UPLOAD_ATTEMPTS):
                s3_client = self._client()
                try:
                    with create_transfer_manager(s3_client, transfer_config) as transfer_manager:
                        address = self._bucket_and_key(key)
                        transfer_manager.upload(str(path), address["Bucket"], address["Key"]).result()
                    return
                except s3_client.exceptions.ClientError as error:
                    # After NoSuchUpload, the stored object may be this file or an older version of it.
                    # The error means that the last request's response was lost, and that the repeated request
                    # found no upload to complete.
                    was_response_lost = isinstance(error, s3_client.exceptions.NoSuchUpload) and attempt == 0
                    if not (was_response_lost or self._enable_checksums_after(error)):
                        raise

    def download(self, key: str, path: Path, object_bytes: int, heartbeat: Heartbeat = lambda: None) -> None:
        """Download an object to a file. If the download fails, remove the file.

        Args:
            key: Key of the object.
            path: Path of the new file.
            object_bytes: Expected size of the object in bytes.
            heartbeat: Function called at least every second in the calling thread. An exception in this
                function ends the download.

        Raises:
            OSError: If the file can't be written.
        """

        def write_parts() -> None:
            """Check the size of the object, and write its content to target_file."""
            stored_bytes, etag = self.size_and_etag(key) or (None, None)
            if stored_bytes != object_bytes:
                size_fault = "does not exist" if stored_bytes is None else f"has {stored_bytes:,} bytes"
                raise WrongSize(
                    f"{self.url}/{key} {size_fault}, but {object_bytes:,} bytes are expected."
                    " Use a different copy of the data"
                )
            for object_part in self.stream(key, object_bytes, etag):
                # Writing fails after the file is closed. This error ends the thread if the caller has
                # returned early.
                target_file.write(object_part)

        try:
            with open(path, "wb") as target_file:
                run_with_heartbeat(write_parts, heartbeat)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def size_and_etag(self, key: str) -> tuple[int, str | None] | None:
        """Return the object's size in bytes and its ETag, or None if the object does not exist.

        The ETag changes when the object is replaced.
        """
        with self._explained_errors(f"looking for {key}", allows_absent=True):
            head_response = self._client().head_object(**self._bucket_and_key(key))
            return head_response["ContentLength"], head_response.get("ETag")
        return None  # the object does not exist

    def stream(self, key: str, object_bytes: int, etag: str | None, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an object from `start` as a small first part, followed by parts of PART_BYTES.

        Up to MAX_STREAMS parts are prefetched, and each part is requested up to MAX_ATTEMPTS times.
        """
        # Don't use s3transfer, because it can't yield bytes and repeats botocore's retries five times.
        part_futures: deque[Future[bytes]] = deque()
        part_start, part_bytes = start, FIRST_PART_BYTES
        while part_start < object_bytes:
            part_end = min(part_start + part_bytes, object_bytes)
            part_futures.append(start_daemon(partial(self._read_part, key, part_start, part_end, etag)))
            # Yield the first part before requesting more, because readers often need only the beginning.
            if part_start == start or len(part_futures) == MAX_STREAMS:
                yield part_futures.popleft().result()
            part_start, part_bytes = part_end, PART_BYTES  # all parts after the first
        while part_futures:
            yield part_futures.popleft().result()

    def _read_part(self, object_key: str, part_start: int, part_end: int, etag: str | None) -> bytes:
        """Return an object's bytes from part_start to part_end, without the byte at part_end.

        The request fails if the object was replaced by one with a different ETag.
        """
        etag_condition = {"IfMatch": etag} if etag else {}
        byte_range = f"bytes={part_start}-{part_end - 1}"  # HTTP ranges include the last byte
        with self._explained_errors(f"reading {object_key}"):
            return self._read_body(object_key, part_end - part_start, Range=byte_range, **etag_condition)

    def _read_body(self, object_key: str, max_bytes: int, **get_request: str) -> bytes:
        """Read an object or a byte range. Make up to MAX_ATTEMPTS requests if connections break.

        Args:
            object_key: Key of the object.
            max_bytes: Largest size in bytes of the expected content.
            get_request: Further arguments of boto3's get_object(), such as the byte range.
        """
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
            get_response = self._client().get_object(**self._bucket_and_key(object_key), **get_request)
            if get_response["ContentLength"] > max_bytes:
                get_response["Body"].close()
                raise StoreError(
                    f"{self.url}/{object_key} has {get_response['ContentLength']:,} bytes,"
                    f" but at most {max_bytes:,} bytes are expected."
                    " The object was replaced, or the store ignores byte ranges"
                )
            try:
                return get_response["Body"].read()
            except Exception:  # botocore and urllib3 raise various errors for a lost or silent connection
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises an error")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Ignore missing objects.

        Each request deletes only one object, because some stores require Content-MD5 for bulk requests.
        """
        for object_key in keys:
            with self._explained_errors(f"deleting {object_key}", allows_absent=True):
                self._client().delete_object(**self._bucket_and_key(object_key))

    def _bucket_and_key(self, object_key: str) -> dict[str, str]:
        """Return the boto3 arguments that identify an object.

        Raise StoreError if the key is a folder or unsafe.
        """
        if not _is_valid_key(object_key):
            raise StoreError(
                f"{self.url}: {object_key!r} is not a valid key."
                " Use names separated by single slashes. The names . and .. are not allowed"
            )
        return {"Bucket": self._bucket, "Key": self._key_prefix + object_key}

    def _client(self) -> "BaseClient":
        """Return this process's client, which the first request creates.

        A new client also updates the endpoint and the secrets that error messages use. If two threads each
        create a client, only one client is kept.
        """
        s3_client = self._client_by_pid.get(os.getpid())
        if s3_client is None:
            s3_client, self._secrets = _connect(self._sends_checksums)
            self._client_by_pid[os.getpid()] = s3_client
            self._endpoint, _, _ = s3_client.meta.endpoint_url.partition("?")
        return s3_client

    @contextmanager
    def _explained_errors(self, operation: str, allows_absent: bool = False) -> Iterator[None]:
        """Convert boto3's errors in the context to StoreErrors with explanations.

        With `allows_absent`, the context ends without an error if the object does not exist.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as boto_error:
            if allows_absent and _parse_error_response(boto_error)[0] in ABSENT_ERROR_CODES:
                return  # the caller handles a missing object
            failure_reason = _explain_error(boto_error, self._endpoint, self._secrets)
            # A new client reads the credentials again and starts with a full retry quota.
            self._client_by_pid.pop(os.getpid(), None)
            # Don't chain the errors, because the traceback may show the output of credential helpers.
            raise StoreError(f"{operation} at {self.url} failed: {failure_reason}") from None


def _is_valid_key(object_key: str) -> bool:
    """Return True if a key has at most 1,024 characters and consists of names other than . and .. ."""
    key_names = object_key.split("/")
    has_valid_names = all(key_name not in ("", ".", "..") for key_name in key_names)
    return len(object_key) <= MAX_KEY_LENGTH and object_key.isprintable() and has_valid_names


def _connect(sends_checksums: bool) -> tuple["BaseClient", tuple[str, ...]]:
    """Create an S3 client, and return it with its credentials, which error messages must not show.

    The client uses a new session, so that processes do not share connections. boto3's environment variables
    override the defaults in this function.
    """
    import boto3
    from botocore.config import Config

    retry_options: dict[str, Any] = {"mode": os.environ.get("AWS_RETRY_MODE", "standard")}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retry_options["total_max_attempts"] = MAX_ATTEMPTS
    request_timeouts = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
    client_options: dict[str, Any] = {"retries": retry_options, **request_timeouts}
    # Many stores refuse the trailing checksums that boto3 sends by default.
    for option_name in ("request_checksum_calculation", "response_checksum_validation"):
        if f"AWS_{option_name.upper()}" not in os.environ:
            client_options[option_name] = "when_required"
    if sends_checksums:
        client_options["request_checksum_calculation"] = "when_supported"
    boto_session = boto3.session.Session()
    # Requests can't be signed without a region. AWS redirects requests to the correct region, and other
    # stores accept any region.
    s3_region = boto_session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    try:
        s3_client = boto_session.client("s3", region_name=s3_region, config=Config(**client_options))
    except ValueError:  # don't show the message, because the quoted URL may contain a password
        raise StoreError(
            "AWS_ENDPOINT_URL or the region is malformed. Use the form https://host[:port] for the URL"
        ) from None
    if "@" in urlsplit(s3_client.meta.endpoint_url).netloc:
        raise StoreError(
            "AWS_ENDPOINT_URL contains a user name or password. Remove both from the URL,"
            " and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    boto_credentials = boto_session.get_credentials()
    if not boto_credentials:
        return s3_client, ()
    access_key, secret_key, session_token, *_ = boto_credentials.get_frozen_credentials()
    return s3_client, tuple(filter(None, (access_key, secret_key, session_token)))


def _parse_error_response(request_error: Exception) -> tuple[str, int, str]:
    """Return the error code, HTTP status and message in the store's response, or ("", 0, "")."""
    error_response = getattr(request_error, "response", None) or {}
    error_details = error_response.get("Error", {})
    error_code, error_message = error_details.get("Code", ""), error_details.get("Message", "")
    http_status = error_response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error_code), http_status, str(error_message)


def _explain_error(request_error: Exception, endpoint: str, credentials: Iterable[str]) -> str:
    """Describe the store's response or the lost connection, and append the remedy."""
    import yaml
    from botocore import exceptions as boto_errors
    from urllib3.exceptions import HTTPError

    if isinstance(request_error, boto_errors.ClientError):
        error_code, http_status, error_message = _parse_error_response(request_error)
        remedy_by_codes = yaml.safe_load(Path(__file__).with_name("s3_remedies.yaml").read_text())
        # Each key of s3_remedies.yaml contains error codes separated by spaces.
        remedies = [remedy for codes, remedy in remedy_by_codes.items() if error_code in codes.split()]
        if not remedies and http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            remedies = [f"the store failed or was busy in all {MAX_ATTEMPTS} attempts. Try again later"]
        redacted_code = redacted(error_code, credentials)
        redacted_message = redacted(error_message, credentials)
        return "; ".join([f"{redacted_code} ({http_status}): {redacted_message}", *remedies[:1]])
    error_name = type(request_error).__name__
    if isinstance(request_error, boto_errors.NoCredentialsError):
        return (
            "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, set AWS_PROFILE,"
            " or use a machine with a role that provides credentials"
        )
    if isinstance(request_error, boto_errors.SSLError):
        return (
            f"the TLS certificate of {endpoint} is not trusted."
            " Set AWS_CA_BUNDLE to a file with trusted certificates, or correct the address"
        )
    if isinstance(request_error, boto_errors.ProxyConnectionError):
        proxy_variable = f"{urlsplit(endpoint).scheme.upper()}_PROXY"
        proxy_url = redacted(str(request_error.kwargs.get("proxy_url", "")), credentials)
        return (
            f"the proxy {proxy_url} does not respond."
            f" Correct or unset {proxy_variable}, or add the store's host to NO_PROXY"
        )
    connection_errors = (
        boto_errors.ConnectionError,
        boto_errors.HTTPClientError,
        boto_errors.IncompleteReadError,
        HTTPError,
    )
    if isinstance(request_error, connection_errors):
        _, _, error_detail = str(getattr(request_error, "kwargs", {}).get("error", "")).rpartition(": ")
        redacted_detail = redacted(error_detail, credentials)
        error_cause = f"{error_name}: {redacted_detail}" if redacted_detail else error_name
        failure = f"{endpoint} did not send a complete response in {MAX_ATTEMPTS} attempts ({error_cause})"
        return f"{failure}. {CHECK_CONNECTION}"
    return (
        f"boto3 could not use the AWS credentials or configuration ({error_name}). Test them with `aws s3 ls`"
    )
