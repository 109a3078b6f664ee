"""Tests of S3 over real HTTP, with moto's server and a proxy that injects faults."""

import os
import re
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ClientError

from onecurve.system import s3 as object_store
from onecurve.system.s3 import CHECKSUMS_SENT, NO_CONDITIONAL_WRITES, ObjectStore, StoreError
from onecurve.system.text import redacted
from tests.conftest import ROOT, rows_of
from tests.support.s3 import BUCKET, PAGE, SECRET, s3, s3_proxy, use_s3  # noqa: F401  (two are fixtures)

PART = 5 * 2**20  # S3 accepts no parts below 5 MiB
BIG = 2 * PART + 1000
SIGNED = "X-Amz-Credential=AKIAIOSFODNN7EXAMPLE/20261122&X-Amz-Signature=0123456789abcdef"


@pytest.fixture(autouse=True)
def proxy(s3_proxy, monkeypatch, capfd):  # noqa: F811
    """Connect all clients through the proxy, and check that no test prints the secret."""
    use_s3(monkeypatch, s3_proxy.endpoint)
    yield s3_proxy
    assert SECRET not in "".join(capfd.readouterr())


@pytest.fixture
def store(request) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}/{request.node.name.replace('/', '+')}")


@pytest.fixture
def quick(monkeypatch) -> None:
    """Set the connection timeout to one second and the number of attempts to two."""
    for name, value in {"CONNECT_TIMEOUT_S": 1, "READ_TIMEOUT_S": 15, "MAX_ATTEMPTS": 2}.items():
        monkeypatch.setattr(object_store, name, value)


@pytest.fixture
def big(tmp_path_factory, monkeypatch) -> Path:
    """Write a file of three parts with random content, so that tests notice misplaced bytes."""
    monkeypatch.setattr(object_store, "PART_BYTES", PART)
    monkeypatch.setattr(object_store, "FIRST_PART_BYTES", PART)
    path = tmp_path_factory.mktemp("big") / "model.safetensors"
    path.write_bytes(os.urandom(BIG))
    return path


def refused(call, *args, **options) -> str:
    """Check that a call raises StoreError with a one-line message without secrets, and return the message."""
    with pytest.raises(StoreError) as raised:
        call(*args, **options)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown
    text = str(raised.value)
    assert "\n" not in text
    return text


def sent(proxy, method: str, part: str = "") -> list[dict[str, str]]:
    """Return the headers of all requests with this method whose path contains this text."""
    return [headers for name, path, headers in proxy.requests if name == method and part in path]


@pytest.mark.parametrize(
    "given",
    "|bucket/a|http://bucket/a|s3:/bucket|s3://|s3:///a|s3://ab|s3://bucket/a//c|s3://bucket/../c|s3://bucket/\n"
    f"|s3://key:{SECRET}@bucket/a".split("|"),
)
def test_a_wrong_url_is_refused(given):
    assert ObjectStore("s3://my.bucket-1/a/b c//").url == "s3://my.bucket-1/a/b c"
    with pytest.raises(ValueError, match=r"s3://|prefix") as raised:
        ObjectStore(given)
    assert SECRET not in str(raised.value)


def test_small_objects_and_files(store, tmp_path):
    assert store.read("a/state.json") is None
    for content in (b"one", b"two"):
        store.write("a/state.json", content)
    store.write("a/empty", b"")
    assert store.read("a/state.json") == b"two"
    assert store.read("a/state.json", max_bytes=3) == b"two"
    assert store.read("a/empty") == b""
    assert "has 3 bytes, but at most 2" in refused(store.read, "a/state.json", max_bytes=2)
    store.delete(["a/state.json", "a/never was"])
    assert store.list() == ["a/empty"]
    for size in (0, 1000):
        (tmp_path / "in").write_bytes(os.urandom(size))
        store.upload(tmp_path / "in", f"of/{size}")
        store.download(f"of/{size}", tmp_path / "out", size)
        assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    with pytest.raises(FileNotFoundError):
        store.upload(tmp_path / "none", "of/none")


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/./b", "a/"])
def test_a_key_stays_below_the_prefix(store, proxy, key):
    assert "is not a valid key" in refused(store.write, key, b"")
    assert "is not a valid key" in refused(store.delete, [key])
    assert not proxy.requests


def test_big_object_in_parts_and_without_checksums(store, proxy, big, tmp_path):
    proxy.refuse_checksums()
    store.upload(big, "model")
    assert len(sent(proxy, "PUT", "partNumber=")) == 3
    store.download("model", tmp_path / "out", BIG)
    assert (tmp_path / "out").read_bytes() == big.read_bytes()
    ranges = sorted(headers["Range"] for headers in sent(proxy, "GET"))
    assert ranges == ["bytes=0-5242879", "bytes=10485760-10486759", "bytes=5242880-10485759"]
    assert b"".join(store.stream("model", BIG, None, PART + 7)) == big.read_bytes()[PART + 7 :]
    assert os.listdir(tmp_path) == ["out"]
    assert not proxy.faults
    # With boto3's default settings, the upload fails
    with pytest.raises(S3UploadFailedError, match="NotImplemented"):
        boto3.client("s3").upload_file(str(big), BUCKET, "other")
    assert proxy.faults["NotImplemented"] == 1


RETAINED = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock"


@pytest.mark.parametrize(
    ("code", "message"), [("InvalidRequest", RETAINED), ("MissingContentMD5", "Missing required header")]
)
def test_a_store_that_asks_for_checksums_gets_them(code, message, store, proxy, big, tmp_path, capfd):
    proxy.require_checksums(code, message)
    store.probe()
    store.upload(big, "model")
    store.download("model", tmp_path / "out", BIG)
    assert (tmp_path / "out").read_bytes() == big.read_bytes()
    late = ObjectStore(store.url)
    late.upload(big, "another")  # `late` behaves like a client in a process that has not probed the store
    assert store.size_and_etag("another")[0] == BIG
    assert capfd.readouterr().out.splitlines() == [CHECKSUMS_SENT] * 2


def test_variables_of_boto3_override_our_settings(store, proxy, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store.write("a", b"content")
    (headers,) = sent(proxy, "PUT")
    assert any(name.lower().startswith("x-amz-checksum") for name in headers)
    proxy.fail(503, "SlowDown")
    assert "SlowDown" in refused(store.write, "a", b"content")


def test_a_dead_proxy_is_named(store, quick, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", "http://me:word@127.0.0.1:9")
    text = refused(store.read, "a")
    assert "the proxy http://...@127.0.0.1:9 does not respond. Correct or unset HTTP_PROXY, or add" in text


def test_list_goes_through_all_pages_and_leaves_out_unsafe_keys(store, proxy):
    keys = [f"steps/{i:03} \u00e4+&.json" for i in range(2 * PAGE + 10)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store.write, keys, [b""] * len(keys)))
    for key in ("steps-not", "other/a"):
        store.write(key, b"")
    for key in ("steps/", "steps/..", "steps/../../x", "steps//a"):
        boto3.client("s3").put_object(Bucket=BUCKET, Key=f"{store.url.split('/', 3)[3]}/{key}")
    assert store.list("steps/") == keys
    assert len(sent(proxy, "GET", "list-type=2")) == 3
    assert store.list("steps") == ["steps-not", *keys]
    assert store.list() == sorted([*keys, "steps-not", "other/a"])
    assert store.list("none") == []


# For each store, the proxy method that changes conditional writes and the name of the counted fault
CONDITIONAL = {
    "takes it": (lambda proxy: None, None),
    "501": (lambda proxy: proxy.refuse_conditional_writes(501, "NotImplemented"), "NotImplemented"),
    "400": (lambda proxy: proxy.refuse_conditional_writes(400, "InvalidArgument"), "InvalidArgument"),
    "ignores it": (lambda proxy: proxy.ignore_conditional_writes(), "ignored"),
}


@pytest.mark.parametrize("behavior", CONDITIONAL)
def test_create_succeeds_once_in_every_store(behavior, store, proxy, capfd):
    spoil, fault = CONDITIONAL[behavior]
    spoil(proxy)
    store.probe()
    assert store.create("owner", b"first")
    assert not store.create("owner", b"second")
    assert store.read("owner") == b"first"
    assert store.list() == ["owner"]
    assert proxy.faults == ({fault: 1} if fault else {})
    assert capfd.readouterr().err.count(NO_CONDITIONAL_WRITES) == bool(fault)


def test_create_recognizes_its_object_after_a_lost_answer(store, proxy):
    proxy.lose_answer(method="PUT")
    assert store.create("owner", b"mine")
    assert not store.create("owner", b"mine")
    proxy.lose_answer(method="PUT")
    assert not store.create("owner", b"another's")
    assert proxy.faults["lose_answer"] == 2


def test_create_waits_for_a_write_at_the_same_time(store, proxy, monkeypatch):
    monkeypatch.setattr(object_store, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(object_store, "BACKOFF_S", 0)
    proxy.fail(409, "ConditionalRequestConflict", times=2, method="PUT")
    assert store.create("owner", b"mine")
    proxy.fail(409, "ConditionalRequestConflict", times=None, method="PUT")
    assert not store.create("another", b"mine")
    assert proxy.faults["ConditionalRequestConflict"] == 2 + 3


@pytest.mark.parametrize(("status", "code", "attempts"), [(503, "SlowDown", 2), (500, "InternalError", 4)])
def test_a_burst_of_errors_is_survived(store, proxy, big, status, code, attempts, monkeypatch, tmp_path):
    # This test limits the attempts, because botocore waits up to 1 + 2 + 4 s after SlowDown.
    monkeypatch.setattr(object_store, "MAX_ATTEMPTS", attempts)
    burst = attempts - 1
    proxy.fail(status, code, times=burst)
    store.write("a", b"content")
    proxy.fail(status, code, times=burst)
    assert store.create("owner", b"")
    proxy.fail(status, code, times=burst, method="PUT", path="partNumber=2")
    store.upload(big, "model")
    for method in ("HEAD", "GET"):
        proxy.fail(status, code, times=burst, method=method, path="model")
    store.download("model", tmp_path / "model", BIG)
    assert proxy.faults[code] == 5 * burst
    proxy.fail(status, code, times=None)
    text = refused(store.write, "a", b"other")
    assert f"writing a at {store.url} failed: {code} ({status}): broken on purpose; the store failed" in text
    proxy.clear()
    assert store.read("a") == b"content"


def test_a_slow_request_is_retried(store, proxy, monkeypatch):
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 1)
    store.write("a", b"content")
    proxy.delay(1.5, times=1)
    assert store.read("a") == b"content"
    assert proxy.faults["delay"] == 1


def test_a_cut_upload_resumes(store, proxy, big, tmp_path):
    proxy.cut_upload(100_000, times=2, path="partNumber=2")
    proxy.cut_upload(0, times=1, path="partNumber=3")
    # Drop the response to the request that completes the upload
    proxy.lose_answer(method="POST", path="uploadId=")
    store.upload(big, "model")
    assert proxy.faults == {"cut_upload": 3, "lose_answer": 1}
    store.download("model", tmp_path / "model", BIG)
    assert (tmp_path / "model").read_bytes() == big.read_bytes()


def test_a_failed_upload_leaves_no_parts(store, proxy, big):
    proxy.cut_upload(100_000, times=None, path="partNumber=2")
    assert "uploading model" in refused(store.upload, big, "model")
    assert proxy.faults["cut_upload"] == object_store.MAX_ATTEMPTS
    assert len(sent(proxy, "DELETE", "uploadId=")) == 1
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)
    assert store.list() == []


@pytest.mark.parametrize("fault", ["cut_download", "stall_download"])
def test_a_broken_download_resumes(store, proxy, big, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 3)
    store.upload(big, "model")
    getattr(proxy, fault)(1_000_000, times=2, path="model", header="range: bytes=(0|5242880)-")
    store.download("model", tmp_path / "model", BIG)
    assert proxy.faults[fault] == 2
    assert (tmp_path / "model").read_bytes() == big.read_bytes()
    assert len(sent(proxy, "GET")) == 3 + 2  # Only the broken parts are read again


def test_a_download_that_is_cut_each_time_is_given_up(store, proxy, big, tmp_path, quick):
    store.upload(big, "model")
    proxy.cut_download(7, times=None)
    assert "did not send a complete response" in refused(store.download, "model", tmp_path / "model", BIG)
    assert "did not send a complete response" in refused(store.read, "model", BIG)
    assert proxy.faults["cut_download"] >= 2 + 2
    assert os.listdir(tmp_path) == []


def test_a_silent_store_is_given_up(store, proxy, big, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 0.3)
    calls = [
        lambda: store.write("a", b""),
        lambda: store.create("a", b""),
        lambda: store.read("a"),
        lambda: store.list(),
        lambda: store.upload(big, "model"),
        lambda: store.download("model", tmp_path / "model", BIG),
    ]
    proxy.black_hole()
    with ThreadPoolExecutor(len(calls)) as pool:
        texts = pool.map(refused, calls, timeout=60)
        assert all(
            f"{proxy.endpoint} did not send a complete response in 2 attempts" in text for text in texts
        )
    assert os.listdir(tmp_path) == []


def test_probe_gives_up_early(store, proxy, monkeypatch):
    store.write("a", b"")
    monkeypatch.setattr(object_store, "PROBE_MAX_S", 1)
    proxy.black_hole()
    assert f"{proxy.endpoint} did not respond within 1 s. Check AWS_ENDPOINT_URL" in refused(store.probe)
    assert proxy.faults["black_hole"] == 1


@pytest.mark.parametrize(("status", "code", "method", "remedy"), rows_of("refusals of a store"))
def test_probe_says_what_is_refused(store, proxy, status, code, method, remedy):
    proxy.fail(status, code, times=None, method=method)
    with pytest.raises(StoreError, match=remedy):
        store.probe()
    assert proxy.faults[code] > 0
    proxy.clear()
    assert method == "DELETE" or store.list() == []


def test_no_such_bucket_and_no_region(monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "NoSuchBucket (404): " in (text := refused(ObjectStore("s3://no-such-bucket/a").probe))
    assert "Create the bucket" in text


def test_no_credentials(store, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    assert "there are no credentials. Set AWS_ACCESS_KEY_ID" in refused(store.probe)
    monkeypatch.setenv("AWS_PROFILE", "of-nobody")
    assert "could not use the AWS credentials or configuration (ProfileNotFound)" in refused(store.probe)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:9", r"Connection refused.*Check AWS_ENDPOINT_URL"),
        ("http://no-such-host.invalid", "Check AWS_ENDPOINT_URL"),
        (f"not an address {SECRET}", "malformed"),
        (f"http://key:{SECRET}@127.0.0.1", "contains a user name or password"),
    ],
)
def test_a_wrong_endpoint_is_refused(endpoint, message, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert re.search(message, refused(store.probe))


def test_a_download_of_another_size_is_refused(store, proxy, tmp_path):
    store.write("a", b"content")
    (tmp_path / "a").write_bytes(b"of an earlier try")
    assert "has 7 bytes, but 8 bytes are expected" in refused(store.download, "a", tmp_path / "a", 8)
    assert "does not exist" in refused(store.download, "b", tmp_path / "b", 8)
    assert os.listdir(tmp_path) == []
    assert not sent(proxy, "GET")
    with pytest.raises(FileNotFoundError):
        store.download("a", tmp_path / "none" / "a", 7)
    proxy.add("no_ranges", lambda handler: handler.headers.__delitem__("Range"), None, "GET")
    assert "the store ignores byte ranges" in refused(store._read_part, "a", 2, 4, None)
    assert proxy.faults["no_ranges"] == 1


def test_a_replaced_object_fails_its_download(store, proxy, tmp_path):
    store.write("a", b"content")
    proxy.on("GET", "/a$", lambda: store.write("a", b"another"))
    assert "was replaced" in refused(store.download, "a", tmp_path / "a", 7)
    assert proxy.faults["callback"] == 1
    assert os.listdir(tmp_path) == []


def test_a_heartbeat_ends_a_download(store, proxy, big, tmp_path):
    class Stop(Exception):
        pass

    def heartbeat() -> None:
        assert threading.current_thread() is main_thread
        if proxy.faults["stall_download"]:
            raise Stop

    main_thread = threading.current_thread()
    store.upload(big, "model")
    proxy.stall_download(1000, times=None)
    with pytest.raises(Stop):
        store.download("model", tmp_path / "model", BIG, heartbeat)
    assert os.listdir(tmp_path) == []


def test_deletes_one_by_one(store, proxy):
    proxy.refuse_bulk_delete()
    keys = ["a", "b/c", "d"]
    for key in keys:
        store.write(key, b"")
    store.delete(keys)
    assert store.list() == []
    assert not proxy.faults
    with pytest.raises(ClientError, match="MissingContentMD5"):
        boto3.client("s3").delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "a"}]})
    assert proxy.faults["MissingContentMD5"] == 1


def test_a_forked_process_makes_its_own_client(store):
    code = (
        "import os, sys; from onecurve.system.s3 import ObjectStore; store = ObjectStore(sys.argv[1])\n"
        "store.write('a', b'content'); child = os.fork()\n"
        "for _ in range(20): assert store.read('a') == b'content'\n"
        "assert len(store._client_by_pid) == (1 if child else 2)\n"
        "if child: assert os.waitpid(child, 0)[1] == 0"
    )
    subprocess.run([sys.executable, "-c", code, store.url], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("code", ["Odd", "{headers}"])
def test_secrets_in_the_answers_of_a_store_are_hidden(store, proxy, monkeypatch, code):
    """Check that headers and credentials repeated in the store's error message and code are hidden."""
    key, token = "short", "a session token/of+words="
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    escapes = "\u009b[31m"  # XML can't contain the character ESC
    proxy.echo(f"Denied{escapes} {SECRET} {{headers}} at http://h{{path}}?{SIGNED} {'x' * 5000}", code=code)
    for call in (store.list, lambda: store.write("a", b""), lambda: store.create("a", b"")):
        text = refused(call)
        header = proxy.requests[-1][2]["Authorization"]
        signature = header.rpartition("Signature=")[2]
        for hidden in (header, signature, SECRET, key, token, "aws4_request", "AKIA"):
            assert hidden not in text, hidden
        assert "Denied" in text
        assert text.isprintable()
        assert len(text) < 800


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The request signature does not match", "The request signature does not match"),
        ("it needs authorization", "it needs authorization"),
        ("Authorization: Bearer short and more", "Authorization: ..."),
        ('{"Authorization": "AWS key:sig"}', '{"Authorization": ...'),
        ("x-amz-security-token: tok, host: h", "x-amz-security-token: ... host: h"),
        ("AWSAccessKeyId=AB&Expires=1", "AWSAccessKeyId=..."),
        ("at https://h/a?X-Amz-Signature=ab1 now", "at https://h/a?... now"),
        ("at https://user:pw@h/a", "at https://...@h/a"),
        ("by AKIAIOSFODNN7EXAMPLE used", "by ... used"),
        ("a\x00b\x1b[0m\n\tc\u202e", "a b [0m c"),
        ("my key and%20key, keys", "my ... and%20..., keys"),
        ("x " * 200, ("x " * 200)[:197] + "..."),
        ("a" + " " * 5000 + "key", "a ..."),
        ("token=" + "y" * 3000 + " token=" + "y" * 3000, "token=..."),
    ],
)
def test_redacted(text, shown):
    assert redacted(text, ["key", ""]) == shown
