"""`.pt2` archives: torch reads what is written, the bytes depend on nothing else, and bad archives are refused."""

from __future__ import annotations

import hashlib
import os
import struct
import time
import tracemalloc
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from hatch_aoti.artifact import archive
from hatch_aoti.artifact.archive import extract_objects, join_packages, read_package, write_package
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = {"model.so": b"\x7fELF" + bytes(5000), "model_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu"}'}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "digits.pt2"
    write_package(path, {"model": FILES})
    return path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The archive that torch itself makes of a tiny model."""
    torch = pytest.importorskip("torch")

    class Twice(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x):
            return x * 2

    path = tmp_path_factory.mktemp("compiled") / "twice.pt2"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        program = torch.export.export(Twice(), (torch.ones(4),))
        options = {"cpp.vec_isa_ok": True, "cpp.march": "", "cpp.simdlen": 1}
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    return path


@pytest.fixture(scope="session")
def rewritten(compiled, tmp_path_factory):
    """The same model, written here from the two files that loading needs."""
    package = read_package(compiled)
    (model,) = package.models
    (name,) = [name for name in package.models[model] if name.endswith(".so")]
    metadata = package.read(model, name.removesuffix(".so") + "_metadata.json")
    path = tmp_path_factory.mktemp("rewritten") / "twice.pt2"
    files = {"twice.so": package.read(model, name), "twice_metadata.json": metadata}
    write_package(path, {model: files, f"{model}2": files})
    return path


def test_torchs_own_archive_is_read(compiled):
    package = read_package(compiled)
    assert package.stem == "twice"
    assert list(package.models) == ["model"]
    assert {".data/serialization_id", "archive_format", "archive_version", "byteorder"} <= set(package.other)
    assert extract_objects(compiled)["model"].startswith(b"\x7fELF")


@pytest.mark.parametrize("model", ["model", "model2"])
def test_torchs_loader_needs_only_the_object_and_its_metadata(rewritten, model):
    torch = pytest.importorskip("torch")
    loader = torch._C._aoti.AOTIModelPackageLoader(str(rewritten), model, False, 1, -1)
    assert loader.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    assert torch.equal(loader.boxed_run([torch.arange(4.0)])[0], torch.arange(4.0) * 2)


def test_aoti_load_package_accepts_what_is_written_here(rewritten, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # it words a warning by running the compiler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        model = torch._inductor.aoti_load_package(str(rewritten))
        assert torch.equal(model(torch.ones(4)), torch.full((4,), 2.0))


def test_torchs_archive_reader_finds_the_same_members_as_in_its_own(rewritten, compiled):
    torch = pytest.importorskip("torch")
    from torch.export.pt2_archive._package import PT2ArchiveReader, is_pt2_package

    def bookkeeping(path):
        with PT2ArchiveReader(str(path)) as reader:
            names = [name for name in reader.get_file_names() if not name.startswith("data/aotinductor/")]
            return {name: reader.read_bytes(name) for name in names if not name.endswith("serialization_id")}

    assert is_pt2_package(str(rewritten))
    assert bookkeeping(rewritten) == bookkeeping(compiled)
    reader = torch._C.PyTorchFileReader(str(rewritten))
    assert len(reader.get_record(".data/serialization_id")) == 40


def test_what_is_written_is_read_back(written):
    package = read_package(written)
    assert {name: package.read("model", name) for name in FILES} == FILES
    assert package.models["model"] == {name: len(content) for name, content in FILES.items()}
    assert extract_objects(written) == {"model": FILES["model.so"]}


def test_contents_are_aligned_like_in_torchs_archives(written):
    data = written.read_bytes()
    with zipfile.ZipFile(written) as reader:
        for entry in reader.infolist():
            name, extra = struct.unpack_from("<2H", data, entry.header_offset + 26)
            assert (entry.header_offset + 30 + name + extra) % 64 == 0


def test_bytes_do_not_depend_on_time_folder_umask_order_or_source(written, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere" / "digits.pt2"
    other.parent.mkdir()
    from_files = {}
    for name, content in reversed(FILES.items()):
        from_files[name] = tmp_path / f"source-of-{name}"
        from_files[name].write_bytes(content)
        from_files[name].chmod(0o755)
    now = time.time() + 1e8
    monkeypatch.setattr(time, "time", lambda: now)
    old = os.umask(0o077)
    try:
        write_package(other, {"model": from_files})
    finally:
        os.umask(old)
    assert other.read_bytes() == written.read_bytes()
    assert other.stat().st_mode == written.stat().st_mode


def test_bytes_depend_on_contents_names_and_stem(written, tmp_path):
    def serialization_id(models, stem="digits"):
        path = tmp_path / "other.pt2"
        write_package(path, models, stem=stem)
        assert path.read_bytes() != written.read_bytes()
        with zipfile.ZipFile(path) as reader:
            return reader.read(f"{stem}/.data/serialization_id")

    ids = [
        serialization_id({"model": {**FILES, "model.so": b"\x7fELF"}}),
        serialization_id({"other": FILES}),
        serialization_id({"model": {"a.so": FILES["model.so"]}}),
    ]
    serialization_id({"model": FILES}, stem="renamed")
    assert len(set(ids)) == len(ids)


def test_large_files_are_copied_in_pieces(tmp_path):
    big = tmp_path / "big.so"
    with big.open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        write_package(tmp_path / "big.pt2", {"model": {"big.so": big}})
        with read_package(tmp_path / "big.pt2").open("model", "big.so") as member:
            digest = hashlib.sha256()
            while chunk := member.read(1 << 20):
                digest.update(chunk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest.digest() == hashlib.sha256(bytes(64 << 20)).digest()
    assert peak < 16 << 20


def test_files_beyond_the_32_bit_limit_stay_readable_and_aligned(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 4000)  # in place of a file of 2 GB
    path = tmp_path / "large.pt2"
    write_package(path, {"model": FILES})
    assert read_package(path).read("model", "model.so") == FILES["model.so"]
    test_contents_are_aligned_like_in_torchs_archives(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(written, tmp_path):
    before = written.read_bytes()
    with pytest.raises(AotiError, match=r"cannot write .*digits\.pt2.*gone\.so"):
        write_package(written, {"model": {**FILES, "weights.blob": tmp_path / "gone.so"}})
    assert written.read_bytes() == before
    assert list(tmp_path.iterdir()) == [written]


def test_an_interrupted_write_never_shows_a_partial_file(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "_write_member", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_package(tmp_path / "digits.pt2", {"model": FILES})
    assert list(tmp_path.iterdir()) == []


def test_writing_into_a_missing_folder_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(AotiError, match=r"cannot write .*gone/digits\.pt2: No such file"):
        write_package(tmp_path / "gone" / "digits.pt2", {"model": FILES})


@pytest.mark.parametrize("name", ["../evil", "/abs", "a/../b", "a\\b", "", "c:evil", "a//b", "nul\0"])
def test_names_that_cannot_be_members_are_not_written(name, tmp_path):
    for models in ({"model": {name: b""}}, {name: FILES}):
        with pytest.raises(AotiError, match="cannot be the name of a"):
            write_package(tmp_path / "digits.pt2", models)


def craft(path: Path, members, *, compression=zipfile.ZIP_STORED):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as writer:
        warnings.simplefilter("ignore")  # zipfile warns of the duplicates that are wanted here
        for name, content in members:
            writer.writestr(name, content)
    return path


GOOD = [("d/archive_format", b"pt2"), ("d/archive_version", b"0"), ("d/data/aotinductor/model/a.so", b"\x7fELF")]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "empty archive"),
        ([*GOOD, ("../evil", b"")], r"`\.\./evil` has a name that leaves"),
        ([*GOOD, ("d/../../evil", b"")], "leaves the archive's folder"),
        ([*GOOD, ("/etc/passwd", b"")], "leaves the archive's folder"),
        ([*GOOD, ("d/a\\b", b"")], "leaves the archive's folder"),
        ([*GOOD, ("toplevel", b"")], "leaves the archive's folder"),
        ([*GOOD, ("e/other", b"")], "outside the folder `d` of the others"),
        ([*GOOD, ("d/data/aotinductor/model/a.so", b"other")], "appears twice"),
        (GOOD[1:], "`archive_format` should say 'pt2'"),
        ([("d/archive_format", b"pt3"), *GOOD[1:]], "`archive_format` should say 'pt2'"),
        ([GOOD[0], ("d/archive_version", b"1"), GOOD[2]], "`archive_version` should say '0'"),
    ],
)
def test_unsound_archives_are_refused_by_name(members, says, tmp_path):
    with pytest.raises(AotiError, match=says) as error:
        read_package(craft(tmp_path / "bad.pt2", members))
    assert str(tmp_path / "bad.pt2") in str(error.value)


def test_compressed_members_are_refused_because_their_size_cannot_be_trusted(tmp_path):
    bomb = craft(tmp_path / "bomb.pt2", [*GOOD, ("d/zeros", bytes(1 << 24))], compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 16
    with pytest.raises(AotiError, match="is compressed"):
        read_package(bomb)


def test_sizes_larger_than_the_file_are_refused(written):
    data = bytearray(written.read_bytes())
    central = data.index(b"PK\x01\x02")
    struct.pack_into("<2I", data, central + 20, 1 << 30, 1 << 30)
    written.write_bytes(data)
    with pytest.raises(AotiError, match="larger than the file"):
        read_package(written)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + bytes(100)])
def test_what_is_not_a_zip_is_refused_by_name(content, tmp_path):
    path = tmp_path / "digits.pt2"
    path.write_bytes(content)
    with pytest.raises(AotiError, match=r"digits\.pt2 is not a zip archive"):
        read_package(path)


def test_every_truncation_is_refused(written):
    data = written.read_bytes()
    for length in range(0, len(data), 41):
        written.write_bytes(data[:length])
        with pytest.raises(AotiError, match=r"digits\.pt2"):
            read_package(written)


def test_damaged_contents_are_found_when_read(written):
    data = bytearray(written.read_bytes())
    data[data.index(b"\x7fELF") + 100] ^= 1
    written.write_bytes(data)
    with pytest.raises(AotiError, match=r"digits\.pt2 is .*damaged.*CRC"):
        extract_objects(written)


def test_a_missing_file_and_a_missing_member_are_errors_that_name_them(written, tmp_path):
    with pytest.raises(AotiError, match=r"cannot read .*gone\.pt2: No such file"):
        read_package(tmp_path / "gone.pt2")
    with pytest.raises(AotiError, match="has no file `other` of a model `model`"):
        read_package(written).read("model", "other")


@pytest.mark.parametrize(("files", "found"), [({"a.json": b"{}"}, "none"), ({"a.so": b"", "b.so": b""}, "a.so, b.so")])
def test_a_model_without_exactly_one_object_is_refused(files, found, tmp_path):
    write_package(tmp_path / "odd.pt2", {"model": files})
    with pytest.raises(AotiError, match=rf"model `model` .* should have one shared object .*found: {found}"):
        extract_objects(tmp_path / "odd.pt2")


def test_joined_archives_are_what_writing_their_models_at_once_gives(tmp_path):
    other = {**FILES, "weights.blob": bytes(range(256)) * 9000}  # more than is copied in one piece
    write_package(tmp_path / "one.pt2", {"model": FILES})
    write_package(tmp_path / "other.pt2", {"named": other})
    ways: tuple[tuple[str, Callable[..., Any], dict[str, Any]], ...] = (
        ("written", write_package, {"b": other, "a": FILES}),
        ("joined", join_packages, {"a": tmp_path / "one.pt2", "b": tmp_path / "other.pt2"}),
    )
    for name, write, models in ways:
        (tmp_path / name).mkdir()
        write(tmp_path / name / "both.pt2", models)
    assert (tmp_path / "joined/both.pt2").read_bytes() == (tmp_path / "written/both.pt2").read_bytes()


def test_only_archives_with_one_model_are_joined(tmp_path):
    write_package(tmp_path / "two.pt2", {"a": FILES, "b": FILES})
    with pytest.raises(AotiError, match=r"two\.pt2 should have one model; it has 2"):
        join_packages(tmp_path / "joined.pt2", {"model": tmp_path / "two.pt2"})
    assert not (tmp_path / "joined.pt2").exists()
