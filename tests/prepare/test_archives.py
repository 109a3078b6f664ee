"""Archives as streams: their members, refused members, and cut connections."""

import hashlib
import io
import os
import re
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch
import torchvision.datasets.imagenet as torchvision_imagenet

from common.system import s3 as object_store
from tests.support.imagenet import DEVKIT, Ilsvrc, make_ilsvrc, synsets_of, tar, write_devkit
from tests.support.s3 import BUCKET, SECRET, aws_env, s3, s3_proxy  # noqa: F401  (two are fixtures)
from tools.prepare import devkit as imagenet
from tools.prepare import inputs
from tools.prepare.archives import members, scan
from tools.prepare.devkit import Devkit
from tools.prepare.inputs import Input, open_input

CONTENT = bytes(range(256)) * 5
KIT = "ILSVRC2012_devkit_t12"


@pytest.fixture(scope="session")
def ilsvrc(tmp_path_factory) -> Ilsvrc:
    return make_ilsvrc(tmp_path_factory.mktemp("ilsvrc"))


def read(where: str | Path, hashed: str | None = None) -> dict[str, bytes]:
    """Reads all files; those of inner archives are named `<archive>/<name>`."""
    found = {}
    with open_input(where, hashed) as stream:
        for member in members(stream):
            if member.name.endswith(".tar"):
                found |= {f"{member.name}/{image.name}": image.read() for image in members(member)}
            else:
                found[member.name] = member.read()
    return found


def scanned(where: Path) -> dict[str, bytes]:
    """Does the same by the positions that scan() returns."""
    content, found = where.read_bytes(), {}
    for listing in scan(where):
        folder = f"{listing.archive}/" if listing.archive else ""
        for name, start, size in zip(listing.names, listing.offsets, listing.sizes, strict=True):
            found[folder + name] = content[start : start + size]
    return found


def by_tarfile(content: bytes, folder: str = "") -> dict[str, bytes]:
    """Does the same by Python's tarfile."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name.endswith(".tar"):
                found |= by_tarfile(archive.extractfile(member).read(), f"{name}/")
            elif member.isfile():
                found[folder + name] = archive.extractfile(member).read()
    return found


READERS = pytest.mark.parametrize("reader", [read, scanned])


@READERS
def test_tarfile_finds_the_same_files(reader, ilsvrc):
    for file, images in ((ilsvrc.train_tar, 60), (ilsvrc.val_tar, 30)):
        found = reader(file)
        assert len(found) == images
        assert list(found.items()) == list(by_tarfile(file.read_bytes()).items())


NAMES = [
    "a_b-c.JPEG",
    "./dot/in/front.JPEG",
    "folder/file.JPEG",
    "x" * 100,
    "folder/" * 20 + "prefix.JPEG",
    "y" * 200,
    "\N{LATIN SMALL LETTER E WITH ACUTE}.JPEG",
    "..two dots",
]


@READERS
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_sizes_of_every_form(reader, format, tmp_path):
    names = NAMES if format != tarfile.USTAR_FORMAT else [name for name in NAMES if name != "y" * 200]
    sizes = (0, 1, 511, 512, 513, 1280)
    files = {name: CONTENT[: sizes[i % len(sizes)]] for i, name in enumerate(names)}
    for content in (tar(files, format), tar({"class.tar": tar(files, format)}, format), tar({}, format)):
        (tmp_path / "a.tar").write_bytes(content)
        assert reader(tmp_path / "a.tar") == by_tarfile(content)


@READERS
def test_folders_and_other_pax_records_are_skipped(reader, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as a:
        for name in (".", "./folder", "folder/inner/"):
            a.addfile(entry(name, tarfile.DIRTYPE))
        a.addfile(
            entry("folder/a.JPEG", size=3, pax={"comment": "=" * 99, "mtime": "1.5"}), io.BytesIO(b"abc")
        )
    assert reader(tmp_path / "a.tar") == {"folder/a.JPEG": b"abc"}


@READERS
def test_a_size_in_pax_goes_before_the_headers(reader, tmp_path):
    """Otherwise two readers of one archive would find different members."""
    hidden = tar({"hidden.JPEG": b"x"})[:1024]
    record = b"13 size=1024\n"
    parts = [header("pax", b"x", len(record)), padded(record), header("a.JPEG", size=0), hidden]
    (tmp_path / "a.tar").write_bytes(b"".join(parts) + bytes(1024))
    assert reader(tmp_path / "a.tar") == {"a.JPEG": hidden} == by_tarfile((tmp_path / "a.tar").read_bytes())


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, pax: dict | None = None
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.pax_headers = kind, size, pax or {}
    return member


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, fields: dict[int, bytes] | None = None):
    """Makes a header in which `fields`, by position, replace some bytes before the checksum is taken."""
    block = bytearray(entry(name, kind, size).tobuf(tarfile.GNU_FORMAT))
    for start, value in (fields or {}).items():
        block[start : start + len(value)] = value
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(record: bytes, kind: bytes = b"x") -> bytes:
    """Makes a PAX record, with its length unless it has one, before a valid header of a.JPEG."""
    records = record if record[:1].isdigit() else b"%d %s\n" % (len(record) + 4, record)
    return header("pax", kind, len(records)) + padded(records) + header("a.JPEG")


NAME, SIZE, MAGIC = 0, 124, 257
PLAIN = "no plain relative name"
REFUSALS = {  # a member's blocks, its name in the message, and the reason
    "parent": (header("../a.JPEG"), "../a.JPEG", PLAIN),
    "parent within": (header("a/../b.JPEG"), "a/../b.JPEG", PLAIN),
    "absolute": (header("/etc/passwd"), "/etc/passwd", PLAIN),
    "empty part": (header("a//b"), "a//b", PLAIN),
    "no name": (header(""), "''", PLAIN),
    "line break": (header("a\nb"), r"'a\nb'", PLAIN),
    "escape": (header("\x1b[2Ja"), r"'\x1b[2Ja'", PLAIN),
    "no UTF-8": (header("a", fields={NAME: b"\xff.JPEG"}), r"'\udcff.JPEG'", PLAIN),
    "parent folder": (header("../a", tarfile.DIRTYPE), "../a", PLAIN),
    "parent in PAX": (pax(b"path=../../b"), "../../b", PLAIN),
    "parent in GNU's": (header("@", b"L", 5) + padded(b"/../b") + header("a.JPEG"), "/../b", PLAIN),
    "symbolic link": (header("a.JPEG", tarfile.SYMTYPE), "a.JPEG", "a symbolic link"),
    "hard link": (header("a.JPEG", tarfile.LNKTYPE), "a.JPEG", "a hard link"),
    "character device": (header("a.JPEG", tarfile.CHRTYPE), "a.JPEG", "a character device"),
    "block device": (header("a.JPEG", tarfile.BLKTYPE), "a.JPEG", "a block device"),
    "fifo": (header("a.JPEG", tarfile.FIFOTYPE), "a.JPEG", "a fifo"),
    "sparse": (header("a.JPEG", tarfile.GNUTYPE_SPARSE), "a.JPEG", "a sparse file"),
    "sparse in PAX": (pax(b"GNU.sparse.major=1"), "pax", "a sparse file"),
    "unknown": (header("a.JPEG", b"Z"), "a.JPEG", "of the unknown kind b'Z'"),
    "large": (header("a.JPEG", size=2**26 + 1), "a.JPEG", "67,108,865 bytes"),
    "absurd": (header("a.JPEG", size=2**60), "a.JPEG", "1,152,921,504,606,846,976 bytes"),
    "absurd archive": (header("a.tar", size=2**60), "", "1,152,921,504,606,846,976 bytes of a.tar"),
    "absurd in PAX": (pax(b"size=99999999999999999999"), "a.JPEG", "99,999,999,999,999,999,999 bytes"),
    "absurd name": (header("@", b"L", 2**21), "an extended header", "2,097,152 bytes"),
    "negative": (header("a.JPEG", fields={SIZE: b"-0000000001\0"}), "a.JPEG", "a size that is no number"),
    "negative in 256": (header("a.JPEG", fields={SIZE: b"\xff" * 12}), "a.JPEG", "a size that is no number"),
    "negative in PAX": (pax(b"size=-1"), "a.JPEG", "-1 bytes"),
    "no octal": (header("a.JPEG", fields={SIZE: b"00000000008\0"}), "a.JPEG", "a size that is no number"),
    "folder with content": (header("a", tarfile.DIRTYPE, fields={SIZE: b"00000000001\0"}), "a", "1 bytes"),
    "PAX cut": (pax(b"99 path=b\n"), "an extended header", "records that are not supported"),
    "PAX endless": (pax(b"0 path=b\n"), "an extended header", "records that are not supported"),
    "PAX for all": (pax(b"path=bb", b"g"), "an extended header", "records that are not supported"),
    "checksum": (b"b" + header("a.JPEG")[1:], "", "no tar header where one is expected, at byte"),
    "magic": (header("a.JPEG", fields={MAGIC: bytes(8)}), "", "no tar header where one is expected, at byte"),
    "no tar": (CONTENT[:512], "", "no tar header where one is expected, at byte"),
}


@READERS
@pytest.mark.parametrize("nested", [False, True], ids=["outer", "inner"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_with_the_names_of_archive_and_member(reader, nested, refusal, tmp_path):
    blocks, name, why = REFUSALS[refusal]
    content = header("good.JPEG", size=3) + padded(b"abc") + blocks + bytes(1024)
    where = tmp_path / "a.tar"
    where.write_bytes(tar({"n00.tar": tar({"b.JPEG": b"x"}), "n01.tar": content}) if nested else content)
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        reader(where)
    assert str(caught.value).startswith(
        f"{where}: n01.tar{':' if name else ''} {name}" if nested else str(where)
    )
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_the_largest_image_is_the_callers(tmp_path):
    where = tmp_path / "a.tar"
    where.write_bytes(tar({"n01.tar": tar({"a.JPEG": CONTENT})}))
    assert [listing.sizes.tolist() for listing in scan(where, len(CONTENT))] == [[len(CONTENT)]]
    why = re.escape(f"{where}: n01.tar: a.JPEG has 1,280 bytes, where at most 1,279 are taken")
    with pytest.raises(ValueError, match=why):
        list(scan(where, len(CONTENT) - 1))
    with open_input(where) as stream, pytest.raises(ValueError, match=why):
        list(members(next(members(stream)), len(CONTENT) - 1))


@READERS
def test_truncated_anywhere(reader, tmp_path):
    inner = tar({"a.JPEG": CONTENT, "b.JPEG": CONTENT[:100]})[: 512 * 8]  # without most of the padding
    where = tmp_path / "a.tar"
    where.write_bytes(tar({"n01.tar": inner}))
    assert len(reader(where)) == 2
    for size in range(0, 512 * 6 + 1, 128):
        where.write_bytes(tar({"n01.tar": inner[:size]}))
        with pytest.raises(ValueError, match=re.escape(f"{where}: n01.tar ") + ".*truncated"):
            reader(where)
        where.write_bytes(tar({"n01.tar": inner})[:size])
        with pytest.raises(ValueError, match=re.escape(str(where)) + ".* truncated"):
            reader(where)


@READERS
def test_content_after_the_end_mark_is_an_error(reader, tmp_path):
    both = tar({"a.JPEG": b"a"}) + tar({"b.JPEG": b"b"})
    (tmp_path / "a.tar").write_bytes(both)
    with pytest.raises(ValueError, match=r"a\.tar has content after its end mark"):
        reader(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(tar({"n01.tar": both}))
    with pytest.raises(ValueError, match=r"a\.tar: n01\.tar has content after its end mark"):
        reader(tmp_path / "a.tar")


@pytest.mark.parametrize("where", ["absent.tar", ".", "s3://training", "ftp://host/a.tar", "https:///a.tar"])
def test_no_input(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no file|no such object|no host"):
        open_input(where)


def test_a_file_that_shrinks_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 1000)
    where = tmp_path / "a.tar"
    where.write_bytes(tar({"a.JPEG": CONTENT, "b.JPEG": CONTENT}))
    with pytest.raises(ValueError, match="of 10,240: leave it alone"), open_input(where) as stream:  # noqa: PT012
        for _ in members(stream):
            os.truncate(where, 2000)


# --- Resuming


@pytest.mark.parametrize("hashed", [None, "md5"])
@pytest.mark.parametrize("chunk", [100, 1000, 2**20])
def test_resumes_at_any_member(hashed, chunk, ilsvrc, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", chunk)
    found, places = list(read(ilsvrc.train_tar).items()), []
    with open_input(ilsvrc.train_tar) as stream:
        for outer in members(stream):
            places.append((outer.next, sum(1 for _ in members(outer))))
    done = 0
    for place, images in places:
        done += images
        with open_input(ilsvrc.train_tar, hashed) as stream:
            stream.skip_to(place)
            left = [(f"{o.name}/{i.name}", i.read()) for o in members(stream) for i in members(o)]
            assert left == found[done:]
            assert not hashed or stream.digest() == ilsvrc.md5(ilsvrc.train_tar)


def test_skipped_bytes_are_read_for_the_md5_only():
    content, asked = os.urandom(10 * 2**20), []

    def chunks_from(position):
        for start in range(position, len(content), 1000):
            asked.append(start)
            yield content[start : start + 1000]

    for hashed, requests in ((None, 1), ("md5", len(content) // 1000 + 1)):
        asked.clear()
        with Input("it", len(content), chunks_from, hashed) as stream:
            stream.skip_to(len(content) - 10)
            assert stream.read(20) == content[-10:]
            assert len(asked) == requests
            assert not hashed or stream.digest() == hashlib.md5(content).hexdigest()
            with pytest.raises(ValueError, match="it ends before byte"):
                stream.skip_to(len(content) + 1)


def test_md5_is_of_the_whole_whatever_was_read(ilsvrc):
    for file in (ilsvrc.train_tar, ilsvrc.val_tar, ilsvrc.devkit):
        with open_input(file, hashed="md5") as stream:
            stream.read(700)
            assert stream.digest() == ilsvrc.md5(file) == hashlib.md5(file.read_bytes()).hexdigest()


# --- From S3 and from the web


@pytest.fixture
def store(s3_proxy, monkeypatch, capfd, ilsvrc):  # noqa: F811
    """Puts the train archive into a bucket behind a proxy; parts are small, and retries do not wait.

    No output may hold the secret.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in aws_env(s3_proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "PART_BYTES", 100_000)
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 20_000)
    s3_proxy.waits_s = []  # instead of sleeping
    monkeypatch.setattr(time, "sleep", s3_proxy.waits_s.append)
    client = boto3.client("s3")
    client.put_object(Bucket=BUCKET, Key="train.tar", Body=ilsvrc.train_tar.read_bytes(), ACL="public-read")
    s3_proxy.requests.clear()
    yield s3_proxy
    assert SECRET not in "".join(capfd.readouterr())


def places(store) -> list[str]:
    return [f"s3://{BUCKET}/train.tar", f"{store.endpoint}/{BUCKET}/train.tar?token=secret"]


@pytest.mark.parametrize("i", [0, 1], ids=["s3", "http"])
class TestRemote:
    def test_the_same_as_from_a_disk(self, i, store, ilsvrc):
        assert read(places(store)[i]) == read(ilsvrc.train_tar)

    def test_resumes_after_cuts(self, i, store, ilsvrc):
        store.cut_download(after=30_000, times=5)
        with open_input(places(store)[i], hashed="md5") as stream:
            found = [image.read() for outer in members(stream) for image in members(outer)]
            assert stream.digest() == ilsvrc.md5(ilsvrc.train_tar)
        assert found == list(ilsvrc.train.values())
        assert store.faults["cut_download"] == 5

    def test_a_burst_of_503(self, i, store, ilsvrc):
        store.fail(503, times=2, method="GET")
        assert read(places(store)[i]) == read(ilsvrc.train_tar)
        assert store.faults["SlowDown"] == 2
        assert len([wait_s for wait_s in store.waits_s if wait_s > 0]) == 2

    def test_skips_by_ranges(self, i, store, ilsvrc):
        with open_input(places(store)[i]) as stream:
            store.requests.clear()
            stream.skip_to(700_000)
            assert stream.read(10) == ilsvrc.train_tar.read_bytes()[700_000:700_010]
        ranges = [
            {k.lower(): v for k, v in h.items()}.get("range") for m, _, h in store.requests if m == "GET"
        ]
        assert ranges
        assert all(int(part.split("=")[1].split("-")[0]) >= 700_000 for part in ranges)

    def test_replaced_meanwhile(self, i, store, ilsvrc):
        store.cut_download(after=30_000, times=None)
        with open_input(places(store)[i]) as stream:
            stream.read(10)
            new = bytes(ilsvrc.train_tar.stat().st_size)
            boto3.client("s3").put_object(Bucket=BUCKET, Key="train.tar", Body=new, ACL="public-read")
            store.clear()
            with pytest.raises(ValueError, match="replaced"):
                stream.read(len(new))

    def test_absent(self, i, store):
        where = places(store)[i].replace("train.tar", "absent.tar")
        with pytest.raises(ValueError, match=r"no such object|answers 404") as caught:
            open_input(where)
        assert where.partition("?")[0] in str(caught.value)

    def test_gives_up(self, i, store, monkeypatch):
        for module in (inputs, object_store):
            monkeypatch.setattr(module, "ATTEMPTS", 2)
        store.cut_download(after=-1, times=None)
        with pytest.raises(ValueError, match=r"2 attempts") as caught:
            read(places(store)[i])
        assert "secret" not in str(caught.value)


def test_a_server_that_cuts_every_answer(store, ilsvrc):
    store.cut_download(after=30_000, times=None)  # fewer bytes than the client's buffer, which are lost
    assert read(places(store)[1]) == read(ilsvrc.train_tar)
    assert store.faults["cut_download"] > 5


def test_a_server_that_falls_silent(store, monkeypatch):
    monkeypatch.setattr(inputs, "SILENCE_S", 0.2)
    monkeypatch.setattr(inputs, "ATTEMPTS", 2)
    store.black_hole(times=None)
    with pytest.raises(ValueError, match=r"byte 0 in 2 attempts \(Timeout"):
        open_input(places(store)[1])


def test_a_url_with_a_password_is_refused_and_not_shown():
    with pytest.raises(ValueError, match=r"'/a\.tar' has no host, a user name") as caught:
        open_input("https://me:password@host/a.tar")
    assert "password" not in str(caught.value)


def test_a_server_without_ranges_serves_from_the_beginning_only(tmp_path, ilsvrc, monkeypatch):
    (tmp_path / "a.tar").write_bytes(ilsvrc.train_tar.read_bytes())

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.tar"
        assert read(url) == read(ilsvrc.train_tar)
        monkeypatch.setattr(inputs, "CHUNK_BYTES", 1000)  # so that a seek is worth a request
        with open_input(url) as stream:
            assert stream.version.endswith("GMT"), "Last-Modified, as there is no ETag"
            stream.skip_to(5120)
            with pytest.raises(ValueError, match="knows no ranges"):
                stream.read(1)
        server.shutdown()


# --- The development kit


def kit(where: Path, subset: bool = True) -> Devkit:
    with open_input(where) as stream:
        return Devkit.read(stream, subset)


def test_torchvision_reads_the_same_from_the_kit(ilsvrc, tmp_path, monkeypatch):
    for part, file in (("devkit", ilsvrc.devkit), ("train", ilsvrc.train_tar), ("val", ilsvrc.val_tar)):
        (tmp_path / file.name).symlink_to(file)
        monkeypatch.setitem(torchvision_imagenet.ARCHIVE_META, part, (file.name, ilsvrc.md5(file)))
    for parse in ("devkit", "train", "val"):
        getattr(torchvision_imagenet, f"parse_{parse}_archive")(tmp_path)
    names, val_wnids = torch.load(tmp_path / torchvision_imagenet.META_FILE, weights_only=True)
    found = kit(ilsvrc.devkit)
    assert dict(found.classes) == {wnid: ", ".join(words) for wnid, words in names.items()}
    assert [found.classes[label][0] for label in found.val_labels] == val_wnids
    for split, labels in (("train", ilsvrc.train_labels), ("val", ilsvrc.val_labels)):
        theirs = torchvision_imagenet.ImageNet(tmp_path, split=split)
        assert {Path(file).name: label for file, label in theirs.samples} == labels
        assert theirs.wnids == [wnid for wnid, _ in found.classes]
    assert found.val_labels.tolist() == [label for _, label in sorted(ilsvrc.val_labels.items())]


def thousand(images: int = 50) -> tuple[np.ndarray, list[int]]:
    """Makes synsets with 1,000 classes, and their ids in the ground truth."""
    wnids = [f"n{i:08d}" for i in range(1000)]
    ids = list(range(1000, 0, -1))
    return synsets_of(wnids, wnids, ids, 3), ids * images


def test_counts_are_those_of_ilsvrc2012_unless_subset(ilsvrc, tmp_path):
    file = tmp_path / DEVKIT
    synsets, ids = thousand()
    write_devkit(file, synsets, ids)
    assert np.bincount(kit(file, subset=False).val_labels).tolist() == [50] * 1000
    for broken, why in (
        (ids[:-1], "ground_truth.txt has 49,999 lines where ILSVRC2012 has 50,000"),
        ([*ids, 1], "ground_truth.txt has 50,001 lines where ILSVRC2012 has 50,000"),
        ([*ids[:-1], 2], "ground_truth.txt has 51 images of class 998 where ILSVRC2012 has 50"),
    ):
        write_devkit(file, synsets, broken)
        with pytest.raises(ValueError, match=re.escape(f"{file}: ") + f".*{why}.*--subset"):
            kit(file, subset=False)
        assert len(kit(file).val_labels) == len(broken)
    with pytest.raises(ValueError, match="has 10 classes where ILSVRC2012 has 1,000: --subset"):
        kit(ilsvrc.devkit, subset=False)


META, TRUTH = f"{KIT}/data/meta.mat", f"{KIT}/data/ILSVRC2012_validation_ground_truth.txt"
BROKEN_KITS = {
    "no meta.mat": ({META: None}, "has no data/meta.mat: give ILSVRC2012_devkit_t12.tar.gz"),
    "no ground truth": ({TRUTH: None}, "has no data/ILSVRC2012_validation_ground_truth.txt"),
    "unknown id": ({TRUTH: b"1\n11\n"}, "has the id 11, which is no class of data/meta.mat"),
    "no number": ({TRUTH: b"1\nn01440764\n"}, "has lines that are no numbers"),
    "negative": ({TRUTH: b"1\n-1\n"}, "has lines that are no numbers"),
    "meta.mat empty": ({META: b""}, "meta.mat is not readable as the list of synsets"),
    "meta.mat damaged": ({META: b"MATLAB 5.0 MAT-file".ljust(200, b"x")}, "meta.mat is not readable as the"),
    "a pickle": ({META: b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR."}, "meta.mat is not readable as the"),
}


@pytest.mark.parametrize("broken", BROKEN_KITS)
def test_a_broken_kit(broken, ilsvrc, tmp_path):
    changed, why = BROKEN_KITS[broken]
    with tarfile.open(ilsvrc.devkit) as archive:
        files = {file.name: archive.extractfile(file).read() for file in archive if file.isfile()}
    files = {name: content for name, content in (files | changed).items() if content is not None}
    with tarfile.open(tmp_path / DEVKIT, "w:gz") as archive:
        for name, content in files.items():
            archive.addfile(entry(name, size=len(content)), io.BytesIO(content))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / DEVKIT}") + ".*" + re.escape(why)):
        kit(tmp_path / DEVKIT)


def test_a_file_that_is_no_kit(ilsvrc, tmp_path, monkeypatch):
    packed, where = ilsvrc.devkit.read_bytes(), tmp_path / DEVKIT
    for content, why in (
        (b"no gzip", "is no gzip file, or damaged"),
        (packed[:-20], "is truncated"),
        (packed[:200] + bytes(50) + packed[250:], "is no gzip file, or damaged"),
        (b"", "is truncated"),
    ):
        where.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{where} {why}")):
            kit(where)
    monkeypatch.setattr(imagenet, "LARGEST_DEVKIT_BYTES", 5000)
    with pytest.raises(ValueError, match="larger than 5,000 bytes"):
        kit(ilsvrc.devkit)


def test_a_link_in_the_kit_is_refused(tmp_path):
    with tarfile.open(tmp_path / DEVKIT, "w:gz") as archive:
        link = entry(META, tarfile.SYMTYPE)
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(ValueError, match=re.escape(f"{META} is a symbolic link")):
        kit(tmp_path / DEVKIT)


def test_a_class_list_that_does_not_fit(tmp_path):
    for wnids, ids in ((["n00000001", "n00000001"], [1, 2]), (["n00000001", "n00000002"], [1, 1])):
        write_devkit(tmp_path / DEVKIT, synsets_of(wnids, ["a", "b"], ids, 1), [1])
        with pytest.raises(ValueError, match="classes without a WordNet id or id of their own"):
            kit(tmp_path / DEVKIT)
    write_devkit(tmp_path / DEVKIT, synsets_of(["../../etc"], ["a"], [1], 1), [1])
    with pytest.raises(ValueError, match="classes without a WordNet id"):
        kit(tmp_path / DEVKIT)
