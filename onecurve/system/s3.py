"""One prefix of an S3 bucket, through boto3, with bounded waits.

The endpoint is AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, and credentials come from boto3's own chain. Errors
name the operation, the address, and the store's redacted code and message.
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

# ATTEMPTS: of a request, with botocore's waits between: without an answer it ends within 102 s
from onecurve.system.output import log
from onecurve.system.text import redacted
from onecurve.system.threads import run_with_heartbeat, start_daemon

if TYPE_CHECKING:  # imported where it is needed: it takes a second
    from botocore.client import BaseClient

CONNECT_S = 5  # per address of the endpoint's name
READ_S = 15  # silence after which a request, or a part of an answer, counts as lost
PROBE_S = 20
PART_BYTES = 16 * 2**20  # larger uploads are multipart; also the unit of downloads
FIRST_BYTES = 2**18  # the first piece of a stream, which may be enough for its reader
STREAMS = 4  # connections of one upload or download

NOT_CONDITIONAL = (
    "S3: this store has no conditional writes (If-None-Match): two runs that start at the same moment in the"
    " same place are not kept apart"
)
CHECKSUMS_SENT = "S3: this store asks for a checksum of each object: they are sent from here on"
CHECK_THE_WAY = "check AWS_ENDPOINT_URL, the network, and the firewall or security group between"


class StoreError(ValueError):
    """An error of the store in one line: what went wrong, where, and what to do."""


class WrongSize(StoreError):
    """Raised when an object is absent, or does not have the expected size."""


class ObjectStore:
    """One prefix of an S3 bucket, `s3://bucket/prefix`. Thread-safe; each process creates its own client.

    All keys are relative to the prefix. Every method raises StoreError, after retries.
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
        self._has_checksums = False  # until the store asks for them
        self._endpoint = "the store"  # its address, once there is a client
        self._clients: dict[int, BaseClient] = {}  # by pid, as a forked process must not share connections
        self._secrets: tuple[str, ...] = ()  # the credentials of the newest client

    def probe(self) -> None:
        """Writes, lists, reads and deletes a small object with a random name, within PROBE_S.

        Prints a warning if the store has no conditional writes; some accept them and ignore the condition.
        """
        end_s = time.monotonic() + PROBE_S

        def check_time() -> None:
            if time.monotonic() > end_s:
                raise StoreError(
                    f"{self.url}: no answer from {self._endpoint} within {PROBE_S} s: {CHECK_THE_WAY}"
                )

        run_with_heartbeat(self._probe, check_time)

    def _probe(self) -> None:
        key, content = f".probe-{secrets.token_hex(8)}/object", secrets.token_bytes(16)
        self.write(key, content)
        try:
            self.list(key)
            if self.read(key) != content:
                raise StoreError(
                    f"{self.url}: an object was read back with another content: use another store"
                )
            if self.create(key, b"must not replace it"):
                self._warn_not_conditional()
        finally:
            self.delete([key])

    def list(self, under: str = "") -> list[str]:
        """All keys that start with `under`, sorted, without keys that _at() refuses.

        Web consoles create keys named `.../` for folders; some tools create `/..`, unsafe in a path.
        """
        with self._explained(f"listing {under or 'the prefix'}"):
            paginator = self._client().get_paginator("list_objects_v2")
            pages = paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + under)
            found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return sorted(filter(_is_plain, (key.removeprefix(self._prefix) for key in found)))

    def read(self, key: str, limit: int = 2**20) -> bytes | None:
        """The content of a small object; None when absent. StoreError above `limit` bytes."""
        with self._explained(f"reading {key}", absent_is_fine=True):
            return self._body(key, limit)
        return None

    def write(self, key: str, content: bytes) -> None:
        """Writes a small object, replacing an existing one."""
        with self._explained(f"writing {key}"):
            self._put(Body=content, **self._at(key))

    def _put(self, **request: Any) -> None:
        """Write an object, again with a checksum if the store asks for one, as for retention."""
        try:
            self._client().put_object(**request)
        except Exception as error:
            if not self._begins_checksums(error):
                raise
            self._client().put_object(**request)

    def _begins_checksums(self, error: Exception) -> bool:
        """Return True where the store's answer asks for a checksum, which the next request will have."""
        code, status, message = _facts(error)
        if self._has_checksums or status != 400 or not re.search("md5|checksum|digest", code + message, re.I):
            return False
        log.info(CHECKSUMS_SENT)
        self._has_checksums = True
        self._clients.clear()
        return True

    def create(self, key: str, content: bytes) -> bool:
        """Writes a small object unless it exists. False if it exists and this call did not write it.

        After a request that was repeated because its answer was lost, an object with this content counts as
        written by it: so the content should be unique to the writer (a random id). On a store without
        conditional writes it checks first and then writes, and prints a warning once.
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
                    if status == 412:  # it exists
                        repeated = error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
                        return repeated and self.read(key, max(len(content), 2**20)) == content
                    if status == 501 or (status == 400 and code in ("InvalidArgument", "InvalidRequest")):
                        self._warn_not_conditional()
                        break
                    if status != 409:  # a concurrent write, which may still fail
                        raise
        if self._conditional or self.size_and_etag(key) is not None:
            return False
        self.write(key, content)
        return True

    def _warn_not_conditional(self) -> None:
        if self._conditional:
            log.info(NOT_CONDITIONAL)
        self._conditional = False

    def upload(self, path: Path, key: str) -> None:
        """Uploads a file, in parts above PART_BYTES. OSError when the file can't be read.

        A failed upload leaves no parts behind, unless the store can't be reached for removing them.
        """
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        config = TransferConfig(
            multipart_threshold=PART_BYTES + 1,
            multipart_chunksize=PART_BYTES,
            max_concurrency=STREAMS,
            preferred_transfer_client="classic",  # CRT, the other client, ignores the endpoint
        )
        with self._explained(f"uploading {key}"):
            for attempt in range(3):
                client = self._client()
                try:
                    with create_transfer_manager(client, config) as manager:
                        manager.upload(str(path), *self._at(key).values()).result()
                    return
                except client.exceptions.ClientError as error:
                    # NoSuchUpload: the answer to the last request was lost, and its repetition found nothing
                    # to complete. The object may be this file or an older one.
                    is_lost = isinstance(error, client.exceptions.NoSuchUpload) and attempt == 0
                    if not (is_lost or self._begins_checksums(error)):
                        raise

    def download(self, key: str, path: Path, size: int, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Downloads an object of `size` bytes to `path`.

        heartbeat() is called at least every second in the calling thread; its exception ends the download.
        On an error nothing is left at `path`. OSError if it can't be written.
        """

        def work() -> None:
            found = self.size_and_etag(key)
            if found is None or found[0] != size:
                there = "is not there" if found is None else f"has {found[0]:,} bytes"
                raise WrongSize(
                    f"{self.url}/{key} {there} where {size:,} bytes are expected: use another copy"
                )
            for piece in self.stream(key, size, found[1]):
                file.write(piece)  # fails once the file is closed: so a download ends whose caller has left

        try:
            with open(path, "wb") as file:
                run_with_heartbeat(work, heartbeat)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def size_and_etag(self, key: str) -> tuple[int, str | None] | None:
        """Size in bytes and ETag, which changes when the object is replaced; None if the object is absent."""
        with self._explained(f"looking for {key}", absent_is_fine=True):
            found = self._client().head_object(**self._at(key))
            return found["ContentLength"], found.get("ETag")
        return None

    def stream(self, key: str, size: int, etag: str | None, start: int = 0) -> Iterator[bytes]:
        """Yields the object's bytes from `start` on: a small piece, then pieces of PART_BYTES, of which
        STREAMS are prefetched. Each piece is tried ATTEMPTS times."""
        # Not s3transfer: it yields no bytes, and repeats five times what botocore has repeated already.
        coming: deque[Future[bytes]] = deque()
        begins = [start, *range(start + FIRST_BYTES, size, PART_BYTES)] if start < size else []
        for number, (begin, end) in enumerate(zip(begins, [*begins[1:], size], strict=False)):
            coming.append(start_daemon(partial(self._piece, key, begin, end, etag)))
            if number == 0 or len(coming) == STREAMS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def _piece(self, key: str, begin: int, end: int, etag: str | None) -> bytes:
        same = {"IfMatch": etag} if etag else {}
        with self._explained(f"reading {key}"):
            return self._body(key, end - begin, Range=f"bytes={begin}-{end - 1}", **same)

    def _body(self, key: str, limit: int, **request: str) -> bytes:
        """Reads an object, or its Range, in up to ATTEMPTS requests where connections break."""
        for attempt in range(ATTEMPTS):
            time.sleep(BACKOFF_S * attempt)
            answer = self._client().get_object(**self._at(key), **request)
            if answer["ContentLength"] > limit:
                answer["Body"].close()
                raise StoreError(
                    f"{self.url}/{key} has {answer['ContentLength']:,} bytes where at most {limit:,} are"
                    " expected: it is not what was written there, or the store ignores ranges"
                )
            try:
                return answer["Body"].read()
            except Exception:  # botocore's or urllib3's, of a connection that is lost or silent
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes one by one, as some stores need Content-MD5 for bulk requests. Absent keys are fine."""
        for key in keys:
            with self._explained(f"deleting {key}", absent_is_fine=True):
                self._client().delete_object(**self._at(key))

    def _at(self, key: str) -> dict[str, str]:
        """boto3's arguments for an object. StoreError for a key that would leave the prefix, or a folder."""
        if not _is_plain(key):
            raise StoreError(
                f"{self.url}: {key!r} is no key: names with single slashes between, none . or .."
            )
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _client(self) -> "BaseClient":
        """This process's client. Two threads may both create one; dropping one is harmless."""
        client = self._clients.get(os.getpid())
        if client is None:
            client, self._secrets = _connect(self._has_checksums)
            self._clients[os.getpid()] = client
            self._endpoint = client.meta.endpoint_url.partition("?")[0]
        return client

    @contextmanager
    def _explained(self, doing: str, absent_is_fine: bool = False) -> Iterator[None]:
        """Turns boto's errors into StoreErrors."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            if absent_is_fine and _facts(error)[0] in ("NoSuchKey", "NotFound", "404"):
                return
            what = _explanation(error, self._endpoint, self._secrets)
            # A new client reads the credentials again, and has a full budget of retries.
            self._clients.pop(os.getpid(), None)
            # Not `from error`, as its traceback may show the output of credential helpers.
            raise StoreError(f"{doing} at {self.url} failed: {what}") from None


def _is_plain(key: str) -> bool:
    """True for up to 1,024 characters of names with single slashes between, none of them . or .. ."""
    names = key.split("/")
    return len(key) <= 1024 and key.isprintable() and all(name not in ("", ".", "..") for name in names)


def _connect(has_checksums: bool) -> tuple["BaseClient", tuple[str, ...]]:
    """Return a client in a new session, so that processes share nothing, and its credentials.

    boto3's own environment variables override our defaults.
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
    credentials = session.get_credentials()
    return client, tuple(filter(None, credentials.get_frozen_credentials()[:3])) if credentials else ()


def _facts(error: Exception) -> tuple[str, int, str]:
    """Code, HTTP status and message of the store's answer; empty for an error without one."""
    answer = getattr(error, "response", None) or {}
    facts, status = answer.get("Error", {}), answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(facts.get("Code", "")), status, str(facts.get("Message", ""))


def _explanation(error: Exception, endpoint: str, secrets_: Iterable[str]) -> str:
    """The store's answer, or why there was none, and what to do."""
    import yaml
    from botocore import exceptions as known
    from urllib3.exceptions import HTTPError

    if isinstance(error, known.ClientError):
        code, status, message = _facts(error)
        remedies = yaml.safe_load(Path(__file__).with_name("s3_remedies.yaml").read_text())
        remedy = next((f"; {text}" for codes, text in remedies.items() if code in codes.split()), "")
        if not remedy and status >= 500:
            remedy = f"; the store failed or was busy in all {ATTEMPTS} attempts: try again later"
        return f"{redacted(code, secrets_)} ({status}): {redacted(message, secrets_)}{remedy}"
    name = type(error).__name__
    if isinstance(error, known.NoCredentialsError):
        return (
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or"
            " run where a role gives them"
        )
    if isinstance(error, known.SSLError):
        return f"{endpoint} has a certificate that is not trusted: set AWS_CA_BUNDLE, or correct the address"
    if isinstance(error, known.ProxyConnectionError):
        variable = f"{urlsplit(endpoint).scheme.upper()}_PROXY"
        proxy = redacted(str(error.kwargs.get("proxy_url", "")), secrets_)
        return f"the proxy {proxy} does not answer: correct or unset {variable}, or add the store to NO_PROXY"
    lost = (known.ConnectionError, known.HTTPClientError, known.IncompleteReadError, HTTPError)
    if isinstance(error, lost):
        reason = redacted(str(getattr(error, "kwargs", {}).get("error", "")).rpartition(": ")[2], secrets_)
        why = f"{name}: {reason}" if reason else name
        return f"no whole answer from {endpoint} in {ATTEMPTS} attempts ({why}): {CHECK_THE_WAY}"
    return f"the credentials or the configuration of AWS could not be used ({name}): try `aws s3 ls`"
