"""Tests of archives read as streams: members, refusals, damaged archives, S3 and the development kit."""

import hashlib
import io
import os
import re
import tarfile
import time
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch
import torchvision.datasets.imagenet as torchvision_imagenet

from onecurve.system import s3 as object_store
from tests.support.data_sets import tar
from tests.support.imagenet import DEVKIT, synsets_of, write_devkit
from tests.support.s3 import BUCKET, SECRET, s3, s3_proxy, use_s3  # noqa: F401  (two are fixtures)
from tools.prepare import archives
from tools.prepare.archives import ArchiveMember, archive_members, open_stream
from tools.prepare.devkit import read_devkit

CONTENT = bytes(range(256)) * 5
KIT = "ILSVRC2012_devkit_t12"


def contents(archive: ArchiveMember, folder: str = "") -> dict[str, bytes]:
    """Read all files in an archive. Files in inner archives are named `<archive>/<name>`."""
    files = {}
    for member in archive_members(archive):
        if member.name.endswith(".tar"):
            files |= contents(member, f"{member.name}/")
        else:
            files[folder + member.name] = member.read()
    return files


def read(location: str | Path, hash_name: str | None = None, headers: bool = False) -> dict[str, bytes]:
    with open_stream(str(location), hash_name, headers_only=headers) as stream:
        return contents(stream.archive)


def by_tarfile(content: bytes, folder: str = "") -> dict[str, bytes]:
    """Read all files in an archive with Python's tarfile, named as in contents()."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name.endswith(".tar"):
                files |= by_tarfile(archive.extractfile(member).read(), f"{name}/")
            elif member.isfile():
                files[folder + name] = archive.extractfile(member).read()
    return files


NAMES = ["a_b-c.JPEG", "./dot/in/front.JPEG", "folder/file.JPEG", "x" * 100, "folder/" * 20 + "prefix.JPEG"]
NAMES += ["\N{LATIN SMALL LETTER E WITH ACUTE}.JPEG", "..two dots", "y" * 200]


@pytest.mark.parametrize("chunk", [100, 1000, 2**20])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_sizes_of_every_form(format, chunk, ilsvrc, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "CHUNK_BYTES", chunk)
    names = NAMES[:-1] if format == tarfile.USTAR_FORMAT else NAMES
    files = {name: CONTENT[: (0, 1, 511, 512, 513, 1280)[i % 6]] for i, name in enumerate(names)}
    path = tmp_path / "a.tar"
    nested = tar({"class.tar": tar(files, format), "empty.tar": tar({}, format)}, format)
    for content in (tar(files, format), nested, tar({}, format), ilsvrc.train_tar.read_bytes()):
        path.write_bytes(content)
        for files_read in (read(path), read(path, "md5"), read(path, headers=True)):
            assert list(files_read.items()) == list(by_tarfile(content).items())


def entry(name: str, entry_type=tarfile.REGTYPE, size: int = 0, pax: dict | None = None) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.pax_headers = entry_type, size, pax or {}
    return member


def test_folders_and_other_pax_records_are_skipped(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as a:
        for name in (".", "./folder", "folder/inner/"):
            a.addfile(entry(name, tarfile.DIRTYPE))
        pax = {"comment": "=" * 99, "mtime": "1.5"}
        a.addfile(entry("folder/a.JPEG", size=3, pax=pax), io.BytesIO(b"abc"))
    assert read(tmp_path / "a.tar") == {"folder/a.JPEG": b"abc"}


def header(
    name: str, entry_type: bytes = tarfile.REGTYPE, size: int = 0, fields: dict[int, bytes] | None = None
):
    """Return a tar header. `fields` maps positions to bytes that replace the header's bytes before the
    checksum.
    """
    block = bytearray(entry(name, entry_type, size).tobuf(tarfile.GNU_FORMAT))
    for start, value in (fields or {}).items():
        block[start : start + len(value)] = value
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(record: bytes) -> bytes:
    """Return a PAX record followed by a valid header of a.JPEG."""
    record = b"%d %s\n" % (len(record) + 4, record)
    return header("pax", b"x", len(record)) + padded(record) + header("a.JPEG")


NAME, SIZE = 0, 124
PLAIN, SPECIAL, DAMAGED = "not a plain relative name", "or another special file", "truncated or damaged"
REFUSALS = {  # ArchiveMember's blocks, its name in the message, and the reason, for each refusal
    "parent": (header("../a.JPEG"), "../a.JPEG", PLAIN),
    "parent within": (header("a/../b.JPEG"), "a/../b.JPEG", PLAIN),
    "absolute": (header("/etc/passwd"), "/etc/passwd", PLAIN),
    "empty part": (header("a//b"), "a//b", PLAIN),
    "no name": (header(""), "''", PLAIN),
    "line break": (header("a\nb"), r"'a\nb'", PLAIN),
    "escape": (header("\x1b[2Ja"), r"'\x1b[2Ja'", PLAIN),
    "no UTF-8": (header("a", fields={NAME: b"\xff.JPEG"}), r"'\udcff.JPEG'", PLAIN),
    "parent in PAX": (pax(b"path=../../b"), "../../b", PLAIN),
    "parent in GNU's": (header("@", b"L", 5) + padded(b"/../b") + header("a.JPEG"), "/../b", PLAIN),
    "symbolic link": (header("a.JPEG", tarfile.SYMTYPE), "a.JPEG", SPECIAL),
    "hard link": (header("a.JPEG", tarfile.LNKTYPE), "a.JPEG", SPECIAL),
    "sparse": (header("a.JPEG", tarfile.GNUTYPE_SPARSE), "a.JPEG", SPECIAL),
    "sparse in PAX": (pax(b"GNU.sparse.map=0,1"), "a.JPEG", SPECIAL),
    "unknown": (header("a.JPEG", b"Z"), "a.JPEG", SPECIAL),
    "large": (header("a.JPEG", size=2**26 + 1), "a.JPEG", "67,108,865 bytes"),
    "absurd": (header("a.JPEG", size=2**60), "a.JPEG", "1,152,921,504,606,846,976 bytes"),
    "absurd archive": (header("a.tar", size=2**60), "", "1,152,921,504,606,846,976 bytes of a.tar"),
    "absurd name": (header("@", b"L", 2**21), "", "an extended header has 2,097,152 bytes"),
    "negative name": (
        header("@", b"L", fields={SIZE: b"\xff" * 4 + b"\xfe" + bytes(7)}),
        "",
        "extended header",
    ),
    "negative": (header("a.JPEG", fields={SIZE: b"\xff" * 12}), "a.JPEG", "has -1 bytes"),
    "negative in PAX": (pax(b"size=-1"), "a.JPEG", "has -1 bytes"),
    "no octal": (header("a.JPEG", fields={SIZE: b"00000000008\0"}), "", DAMAGED),
    "checksum": (b"b" + header("a.JPEG")[1:], "", DAMAGED),
    "no tar": (CONTENT[:512], "", DAMAGED),
    "joined": (bytes(1024) + header("a.JPEG"), "", "contains data after its end mark"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_with_the_names_of_archive_and_member(refusal, tmp_path):
    blocks, name, reason = REFUSALS[refusal]
    content = header("good.JPEG", size=3) + padded(b"abc") + blocks + bytes(1024)
    path = tmp_path / "a.tar"
    for nested in (False, True):
        path.write_bytes(tar({"n00.tar": tar({"b.JPEG": b"x"}), "n01.tar": content}) if nested else content)
        with pytest.raises(ValueError, match=re.escape(reason)) as raised:
            read(path)
        begin = f"{path}: n01.tar" if nested else str(path)
        assert str(raised.value).startswith(f"{begin}: {name} " if name else begin)
        assert "\n" not in str(raised.value)
        assert "\x1b" not in str(raised.value)


def test_truncated_anywhere(tmp_path):
    # The archive ends before most of its padding.
    inner = tar({"a.JPEG": CONTENT, "b.JPEG": CONTENT[:100]})[: 512 * 8]
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"n01.tar": inner}))
    assert len(read(path)) == 2
    for size in range(0, 512 * 6 + 1, 128):
        for content, begin in ((inner[:size], ": n01.tar "), (tar({"n01.tar": inner})[:size], "")):
            path.write_bytes(tar({"n01.tar": content}) if begin else content)
            for headers in (False, True):
                with pytest.raises(ValueError, match=re.escape(f"{path}{begin}") + ".*truncated"):
                    read(path, headers=headers)


@pytest.mark.parametrize("location", ["absent.tar", ".", "s3://training"])
def test_no_archive(location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not a file|does not exist"):
        open_stream(location)


def test_a_file_that_shrinks_during_a_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "CHUNK_BYTES", 1000)
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"a.JPEG": CONTENT, "b.JPEG": CONTENT}))
    with pytest.raises(ValueError, match=r"of 10,240\. Do not"), open_stream(str(path)) as stream:  # noqa: PT012
        for member in archive_members(stream.archive):
            member.read()
            os.truncate(path, 2000)


def test_the_hash_covers_the_whole_file(ilsvrc):
    for position in (700, 10_000, ilsvrc.train_tar.stat().st_size):
        with open_stream(str(ilsvrc.train_tar), "md5") as stream:
            stream.seek(position)
            assert stream.digest() == hashlib.md5(ilsvrc.train_tar.read_bytes()).hexdigest()


# --- Archives in S3

IN_S3 = f"s3://{BUCKET}/train.tar"


@pytest.fixture
def store(s3_proxy, monkeypatch, capfd, ilsvrc):  # noqa: F811
    """Upload the train archive to a bucket behind a fault proxy. Clients read small parts and retry
    immediately.

    No output may contain the secret.
    """
    use_s3(monkeypatch, s3_proxy.endpoint)
    monkeypatch.setattr(object_store, "PART_BYTES", 100_000)
    monkeypatch.setattr(archives, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    boto3.client("s3").put_object(Bucket=BUCKET, Key="train.tar", Body=ilsvrc.train_tar.read_bytes())
    s3_proxy.requests.clear()
    yield s3_proxy
    assert SECRET not in "".join(capfd.readouterr())


def test_s3_resumes_after_cuts_and_busy_answers(store, ilsvrc):
    store.cut_download(after=30_000, times=2)
    store.fail(503, times=2, method="GET")
    with open_stream(IN_S3, "md5") as stream:
        assert list(contents(stream.archive).values()) == list(ilsvrc.train.values())
        assert stream.digest() == ilsvrc.md5(ilsvrc.train_tar)
    assert (store.faults["cut_download"], store.faults["SlowDown"]) == (2, 2)


def test_s3_skips_by_ranges(store, ilsvrc):
    with open_stream(IN_S3) as stream:
        store.requests.clear()
        stream.seek(700_000)
        assert stream.read(10) == ilsvrc.train_tar.read_bytes()[700_000:700_010]
    ranges = [{k.lower(): v for k, v in h.items()}.get("range") for m, _, h in store.requests if m == "GET"]
    assert ranges
    assert all(int(part.split("=")[1].split("-")[0]) >= 700_000 for part in ranges)


def test_s3_replaced_meanwhile(store, ilsvrc):
    with open_stream(IN_S3) as stream:
        stream.read(10)
        new = bytes(ilsvrc.train_tar.stat().st_size)
        boto3.client("s3").put_object(Bucket=BUCKET, Key="train.tar", Body=new)
        with pytest.raises(ValueError, match="replaced"):
            stream.read(len(new))


def test_s3_absent_or_out_of_reach(store, monkeypatch):
    with pytest.raises(ValueError, match=f"s3://{BUCKET}/absent.tar does not exist"):
        open_stream(f"s3://{BUCKET}/absent.tar")
    monkeypatch.setattr(object_store, "MAX_ATTEMPTS", 2)
    store.cut_download(after=-1, times=None)
    with pytest.raises(ValueError, match="2 attempts"):
        read(IN_S3)


# --- The development kit


def kit(path: Path, subset: bool = True) -> tuple[dict[str, str], np.ndarray]:
    with open_stream(str(path)) as stream:
        return read_devkit(stream, subset)


def test_torchvision_reads_the_same_from_the_kit(ilsvrc, tmp_path, monkeypatch):
    for part, file in (("devkit", ilsvrc.devkit), ("train", ilsvrc.train_tar), ("val", ilsvrc.val_tar)):
        (tmp_path / file.name).symlink_to(file)
        monkeypatch.setitem(torchvision_imagenet.ARCHIVE_META, part, (file.name, ilsvrc.md5(file)))
    for parse in ("devkit", "train", "val"):
        getattr(torchvision_imagenet, f"parse_{parse}_archive")(tmp_path)
    names, val_wnids = torch.load(tmp_path / torchvision_imagenet.META_FILE, weights_only=True)
    words, val_labels = kit(ilsvrc.devkit)
    assert words == {wnid: ", ".join(class_names) for wnid, class_names in names.items()}
    assert [[*words][label] for label in val_labels] == val_wnids
    for split, labels in (("train", ilsvrc.train_labels), ("val", ilsvrc.val_labels)):
        dataset = torchvision_imagenet.ImageNet(tmp_path, split=split)
        assert {Path(file).name: label for file, label in dataset.samples} == labels
        assert dataset.wnids == [*words]
    assert val_labels.tolist() == [label for _, label in sorted(ilsvrc.val_labels.items())]


def test_counts_are_those_of_ilsvrc2012_unless_subset(ilsvrc, tmp_path):
    file = tmp_path / DEVKIT
    wnids, ids = [f"n{i:08d}" for i in range(1000)], list(range(1000, 0, -1))
    synsets, ids = synsets_of(wnids, wnids, ids, 3), ids * 50
    write_devkit(file, synsets, ids)
    assert np.bincount(kit(file, subset=False)[1]).tolist() == [50] * 1000
    for broken, reason in (
        (ids[:-1], "ground_truth.txt contains 49,999 lines, but ILSVRC2012 has 50,000"),
        ([*ids, 1], "ground_truth.txt contains 50,001 lines, but ILSVRC2012 has 50,000"),
        ([*ids[:-1], 2], "ground_truth.txt contains 51 images of class 998, but ILSVRC2012 has 50"),
    ):
        write_devkit(file, synsets, broken)
        with pytest.raises(ValueError, match=re.escape(f"{file}: ") + f".*{reason}.*--subset"):
            kit(file, subset=False)
        assert len(kit(file)[1]) == len(broken)
    with pytest.raises(ValueError, match=r"contains 10 classes, but ILSVRC2012 has 1,000\. Add --subset"):
        kit(ilsvrc.devkit, subset=False)


META, TRUTH = f"{KIT}/data/meta.mat", f"{KIT}/data/ILSVRC2012_validation_ground_truth.txt"
BROKEN_KITS = {
    "no meta.mat": ({META: None}, "does not contain data/meta.mat. Pass ILSVRC2012_devkit_t12.tar.gz"),
    "no ground truth": ({TRUTH: None}, "does not contain data/ILSVRC2012_validation_ground_truth.txt"),
    "unknown id": ({TRUTH: b"1\n11\n"}, "contains the id '11', which is not a class in data/meta.mat"),
    "no number": ({TRUTH: b"1\nn01440764\n"}, "contains the id 'n01440764', which is not a class"),
    "meta.mat empty": ({META: b""}, "meta.mat can't be read as a list of synsets"),
    "meta.mat damaged": ({META: b"MATLAB 5.0 MAT-file".ljust(200, b"x")}, "meta.mat can't be read as a"),
    "a pickle": ({META: b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR."}, "meta.mat can't be read as a"),
}


@pytest.mark.parametrize("broken", BROKEN_KITS)
def test_a_broken_kit(broken, ilsvrc, tmp_path):
    changed, reason = BROKEN_KITS[broken]
    with tarfile.open(ilsvrc.devkit) as archive:
        files = {file.name: archive.extractfile(file).read() for file in archive if file.isfile()}
    files = {name: content for name, content in (files | changed).items() if content is not None}
    with tarfile.open(tmp_path / DEVKIT, "w:gz") as archive:
        for name, content in files.items():
            archive.addfile(entry(name, size=len(content)), io.BytesIO(content))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / DEVKIT}") + ".*" + re.escape(reason)):
        kit(tmp_path / DEVKIT)


def test_a_file_that_is_no_kit(ilsvrc, tmp_path):
    packed, path = ilsvrc.devkit.read_bytes(), tmp_path / DEVKIT
    for content in (b"no gzip", packed[:-20], packed[:200] + bytes(50) + packed[250:], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path} is damaged or is not a gzip file")):
            kit(path)


def test_a_class_list_that_does_not_fit(tmp_path):
    for wnids, ids in ((["n00000001", "n00000001"], [1, 2]), (["n00000001", "n00000002"], [1, 1])):
        write_devkit(tmp_path / DEVKIT, synsets_of(wnids, ["a", "b"], ids, 1), [1])
        with pytest.raises(ValueError, match="classes without a unique WordNet id or ILSVRC2012 id"):
            kit(tmp_path / DEVKIT)
    write_devkit(tmp_path / DEVKIT, synsets_of(["../../etc"], ["a"], [1], 1), [1])
    with pytest.raises(ValueError, match="classes without a unique WordNet id"):
        kit(tmp_path / DEVKIT)
