"""Weights files that hold something else than a model's tensors: refused in words, with the tensor's name."""

from __future__ import annotations

import types

import pytest
import torch

from hatch_aoti.errors import ModelError
from hatch_aoti.export.module import load_weights

ODD = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, 3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
}


def load(tmp_path, state):
    torch.save(state, tmp_path / "weights.pt")
    entry = types.SimpleNamespace(name="net", weights="weights.pt", model="net:Net")
    module = torch.nn.Linear(3, 3, bias=False)
    load_weights(entry, module, tmp_path / "weights.pt")
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_in_another_form_is_named(tmp_path, kind):
    with pytest.raises(ModelError, match=r"weights\.pt") as info:
        load(tmp_path, {"weight": ODD[kind]()})
    assert f"holds weight as a {kind} tensor" in info.value.reason


def test_a_key_that_is_no_name_is_shown(tmp_path):
    with pytest.raises(ModelError, match="7 is a key, and no name"):
        load(tmp_path, {"weight": torch.eye(3), 7: torch.eye(3)})


def test_ordinary_weights_are_loaded(tmp_path):
    assert torch.equal(load(tmp_path, {"weight": torch.eye(3)}).weight, torch.eye(3))
