"""A store or web server that sends odd keys, endless answers, or the secrets of its request."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.checkpoint.mirror import Mirror, committed, fetch_log
from common.run.lease import PrefixRecord, _parsed, _who
from common.system import s3 as object_store
from common.system.redaction import redacted
from common.system.s3 import ObjectStore
from tests.conftest import ROOT
from tests.support.s3 import BUCKET, SECRET, s3, s3_proxy  # noqa: F401  (two are fixtures)
from tests.system.test_s3 import one_loader, proxy, refused, store  # noqa: F401  (three are fixtures)
from tools.prepare.inputs import open_input

SIGNED = (
    "X-Amz-Credential=AKIAIOSFODNN7EXAMPLE/20261122&X-Amz-Signature=0123456789abcdef&X-Amz-Security-Token=tok"
)
MIB = 2**20


def put_raw(store: ObjectStore, key: str) -> None:  # noqa: F811
    """Puts an object under a key that ObjectStore itself refuses."""
    client = store._client()
    client.put_object(Bucket=BUCKET, Key=f"{store.url.split('/', 3)[3]}/{key}", Body=b"theirs")


def test_keys_of_others_break_nothing(store, proxy, tmp_path):  # noqa: F811
    odd = [
        "checkpoints/step_00000004/..",
        "checkpoints/step_00000004/../../x",
        "checkpoints/step_00000004//a",
        "checkpoints/step_000000000004/manifest.json",  # another name for step 4
        f"checkpoints/step_{'9' * 400}/manifest.json",
        "telemetry-parts/../000000000000000-000000000000006",
        f"telemetry-parts/telemetry-{'h' * 300}.jsonl/000000000000000-000000000000006",
        "telemetry-parts/telemetry-h.jsonl/../000000000000000-000000000000006",
    ]
    for key in odd:
        put_raw(store, key)
    for step in (4, 8, 12):
        store.write(f"checkpoints/step_{step:08d}/manifest.json", b"{}")
    store.write("telemetry-parts/telemetry-h.jsonl/000000000000000-000000000000004", b"ours")
    said = []
    mirror = Mirror(store, tmp_path, None, said.append, lambda: None)
    mirror._prune({8})
    assert committed(store) == {8, 12}, "of a newer step another run has become the owner"
    fetch_log(store, tmp_path)
    mirror.send_last_files({})
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry-h.jsonl"]
    assert (tmp_path / "telemetry-h.jsonl").read_bytes() == b"ours"
    assert not said


def test_a_listing_ends(store, proxy, monkeypatch):  # noqa: F811
    prefix = store.url.split("/", 3)[3]
    proxy.list_for_ever(lambda page: [f"{prefix}/{page}"], lambda page: "same")
    assert "does not end" in refused(store.list)
    assert proxy.faults["list_for_ever"] == 2
    for name, bound in {"LIST_PAGES": 5, "LIST_KEYS": 30}.items():
        proxy.clear()
        proxy.faults.clear()
        with monkeypatch.context() as patch:
            patch.setattr(object_store, name, bound)
            proxy.list_for_ever(lambda page: [f"{prefix}/{page}-{i}" for i in range(10)], str)
            assert f" {bound} {name[5:].lower()}" in refused(store.list)
            assert proxy.faults["list_for_ever"] <= 6
    proxy.clear()
    proxy.list_for_ever(lambda page: ["elsewhere/a", f"{prefix}/a"], lambda page: "", times=1)
    assert store.list() == ["a"], "a key of another prefix is none of ours"


MEASURED = """
import resource, sys
from common.system import s3 as object_store
from common.system.s3 import ObjectStore, StoreError
object_store.ATTEMPTS = 2
store = ObjectStore(sys.argv[1])
store.write("a", b"content")
calls = {
    "list": store.list, "read": lambda: store.read("a"), "write": lambda: store.write("w", b""),
}
print("ready", flush=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for words in sys.stdin:
    try:
        calls[words.strip()]()
        print("no error", flush=True)
    except StoreError as error:
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{grown_mib:.0f} {error}", flush=True)
"""


def test_bodies_without_end_take_no_memory(store, proxy):  # noqa: F811
    """Endless errors, one of 300 MiB, and an endless listing and object."""
    words = [sys.executable, "-c", MEASURED, store.url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        patience = threading.Timer(120, process.kill)
        patience.start()
        assert process.stdout.readline() == "ready\n"
        for call, says, fault in [
            ("write", "500", {"status": 500, "size": 300 * MIB, "method": "PUT"}),
            ("list", "403", {"status": 403, "size": None, "method": "GET"}),
            ("read", "503", {"status": 503, "size": None, "method": "GET"}),
            ("list", "MiB", {"status": 200, "size": None, "method": "GET", "content": b"<a/>" * 2**14}),
        ]:
            proxy.clear()
            proxy.flood(**fault)
            process.stdin.write(f"{call}\n")
            process.stdin.flush()
            grown_mib, _, text = process.stdout.readline().partition(" ")
            assert int(grown_mib) < 80, text
            assert says in text
        patience.cancel()
        process.kill()


def test_an_object_does_not_exceed_its_range(store, proxy, tmp_path):  # noqa: F811
    store.write("a", b"content")

    def too_long(handler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-6/7")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"content and more")
        return handler._close()

    proxy.add("too_long", too_long, times=None, method="GET")
    assert "more than the 7 bytes" in refused(store.read, "a")
    assert "more than the 7 bytes" in refused(store.download, "a", tmp_path / "a", 7)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("code", ["Odd", "{headers}"])
def test_what_a_store_echoes_is_not_shown(store, proxy, monkeypatch, code):  # noqa: F811
    key, token = "short", "a session token/of+words="
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    escapes = "\x1b[31m".replace("\x1b", "\u009b")  # XML has no ESC
    proxy.echo(f"Denied{escapes} {SECRET} {{headers}} at http://h{{path}}?{SIGNED} {'x' * 5000}", code=code)
    for call in (store.list, lambda: store.write("a", b""), lambda: store.create("a", b"")):
        text = refused(call)
        [headers] = [headers for _, _, headers in proxy.requests[-1:]]
        signature = headers["Authorization"].rpartition("Signature=")[2]
        assert signature not in text
        assert headers["Authorization"] not in text
        for hidden in (SECRET, key, token, "aws4_request", "AKIA", "0123456789abcdef", "X-Amz-Credential=A"):
            assert hidden not in text, hidden
        assert "Denied" in text
        assert text.isprintable()
        assert len(text) < 800
    proxy.clear()
    proxy.echo("{headers}", code="Odd", times=None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    assert "Odd (403)" in refused(ObjectStore(store.url).list)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Access Denied", "Access Denied"),
        (
            "The request signature we calculated does not match",
            "The request signature we calculated does not match",
        ),
        ("it needs authorization", "it needs authorization"),
        ("Authorization: Bearer short and more", "Authorization: ..."),
        ("authorization=Basic dTpw", "authorization=..."),
        ('{"Authorization": "AWS key:sig"}', '{"Authorization": ...'),
        ("Proxy-Authorization: Basic dTpw", "Proxy-Authorization: ..."),
        ("x-amz-security-token: tok, host: h", "x-amz-security-token: ... host: h"),
        ("Signature=ab12 and", "Signature=... and"),
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


def test_an_owner_record_with_any_content(store):  # noqa: F811
    """An owner.json with any content is read without a traceback, and shown in one bounded line."""
    for content in (b"[" * 100_000, b"\xff\x00", b'{"pid": 1e999}'):
        store.write("owner.json", content)
        assert isinstance(_parsed(PrefixRecord(store).read()), dict)
    odd = {"host": "\x1b[31m" + "h" * 5000, "pid": [1] * 1000, "since": {"\n": 1}}
    text = _who(_parsed(json.dumps(odd)))
    assert text.isprintable()
    assert len(text) < 700


def test_a_web_server_without_end(proxy, tmp_path: Path):  # noqa: F811
    """Sends bytes beyond the stated size, redirects with endless bodies, and errors that repeat the query."""
    url = f"{proxy.endpoint}/file?{SIGNED}"

    def endless(handler) -> bool:
        start = handler.headers["Range"].removeprefix("bytes=").partition("-")[0]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-6/7")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"content"[int(start) :] + b"x" * MIB)
        return handler._close()

    def redirect(handler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", "/there")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b"x" * MIB)
            body.append(MIB)
        return handler._close()

    body: list[int] = []
    proxy.add("endless", endless, times=None, path="/there")
    proxy.add("redirect", redirect, times=None, path="/file")
    with open_input(url) as source:
        assert source.read(100) == b"content"
        assert source.read(100) == b""
    assert len(body) < 40, "the whole body of the redirect was read"
    proxy.clear()
    for status, reason in ((403, f"no {SIGNED}"), (302, "loop")):

        def refuse(handler, status=status, reason=reason) -> bool:
            handler.send_response(status, reason)
            handler.send_header("Location", handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        proxy.add("refuse", refuse, times=None)
        with pytest.raises(ValueError, match=str(status)) as caught:
            open_input(url)
        assert "X-Amz" not in str(caught.value)
        assert "\n" not in str(caught.value)
        proxy.clear()
