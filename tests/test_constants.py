"""Constants outside the compiled objects."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from hatch_aoti.artifact.constants_file import ALIGNMENT, header_digest, merge_constants, write_constants
from hatch_aoti.runtime.constants import map_constants
from hatch_aoti.runtime.declarations import LoadError

TENSORS = {
    "weight": torch.randn(5, 3),
    "transposed": torch.randn(4, 6).t(),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "half": torch.randn(7).to(torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex128),
}


def test_constants_come_back_with_values_dtypes_shapes_and_strides(tmp_path):
    path = tmp_path / "constants.safetensors"
    write_constants(path, "model", TENSORS)
    mapped = map_constants(path, "model")
    assert mapped.keys() == TENSORS.keys()
    for name, want in TENSORS.items():
        got = mapped[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert torch.equal(got, want), name
        if want.numel():
            assert got.stride() == want.stride(), name
            assert got.data_ptr() % ALIGNMENT == 0, name


def test_the_file_is_a_safetensors_file_that_others_can_read(tmp_path):
    path = tmp_path / "constants.safetensors"
    write_constants(path, "model", {"weight": TENSORS["weight"]})
    with safe_open(path, "pt") as file:
        index = json.loads(file.metadata()["model"])
        assert torch.equal(file.get_tensor(index["weight"]["tensor"]), TENSORS["weight"])


def test_equal_tensors_are_stored_once_within_and_across_models(tmp_path):
    shared = torch.randn(100, 100)
    write_constants(tmp_path / "a", "a", {"w": shared, "tied": shared.clone(), "own": torch.randn(3)})
    write_constants(tmp_path / "b", "b", {"encoder.w": shared.clone()})
    merge_constants(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"])
    assert (tmp_path / "merged").stat().st_size < 1.1 * shared.nbytes
    a, b = map_constants(tmp_path / "merged", "a"), map_constants(tmp_path / "merged", "b")
    assert a["w"].data_ptr() == a["tied"].data_ptr() == b["encoder.w"].data_ptr()
    assert torch.equal(b["encoder.w"], shared)


def test_the_bytes_do_not_depend_on_the_order_of_the_tensors(tmp_path):
    write_constants(tmp_path / "a", "model", TENSORS)
    write_constants(tmp_path / "b", "model", dict(reversed(TENSORS.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_writing_to_a_mapped_constant_does_not_change_the_file(tmp_path):
    """Processes share the file's pages (pytorch/pytorch#169154: a copy per process); none may write through."""
    path = tmp_path / "constants.safetensors"
    write_constants(path, "model", TENSORS)
    before = path.read_bytes()
    map_constants(path, "model")["weight"].zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "header", "other model"])
def test_a_missing_or_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "constants.safetensors"
    if damage != "missing":
        write_constants(path, "model", TENSORS)
    content = b"" if damage == "missing" else path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(content[:-ALIGNMENT])
    elif damage == "header":
        path.write_bytes(b"\xff" * 8 + content[8:])
    with pytest.raises(LoadError, match=r"constants\.safetensors is (missing|damaged)"):
        map_constants(path, "another" if damage == "other model" else "model")


def test_a_failed_write_leaves_nothing(tmp_path):
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        write_constants(tmp_path / "file", "model", {"w": Broken()})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_build_is_refused(tmp_path):
    path = tmp_path / "constants.safetensors"
    write_constants(path, "model", {"weight": torch.zeros(3)})
    before = header_digest(path)
    assert map_constants(path, "model", before)["weight"].tolist() == [0, 0, 0]
    write_constants(path, "model", {"weight": torch.ones(3)})
    with pytest.raises(LoadError, match=r"constants\.safetensors is not the file that this _models\.py was built with"):
        map_constants(path, "model", before)


def test_constants_are_on_the_cpu_whatever_the_default_device_is(tmp_path):
    path = tmp_path / "constants.safetensors"
    write_constants(path, "model", TENSORS)
    with torch.device("meta"):
        mapped = map_constants(path, "model")
    assert torch.equal(mapped["weight"], TENSORS["weight"])
