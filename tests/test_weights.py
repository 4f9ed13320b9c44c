"""Files of weights: what strict `load_state_dict` takes is loaded, and what does not fit is refused in words."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from hatch_aoti.errors import ModelError
from hatch_aoti.export.weights import load_weights
from hatch_aoti.settings.model import ModelSettings

ODD = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, 3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
}


def load(tmp_path, state, module=None, *, file="weights.pt", key=""):
    """Save a checkpoint, load it into a module, and return the module with the notes."""
    path = tmp_path / file
    if isinstance(state, bytes):
        path.write_bytes(state)
    elif state is not None:
        (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    entry = ModelSettings(name="net", model="net:Net", inputs={}, weights=f"{file}#{key}" if key else file)
    module = torch.nn.Linear(3, 3, bias=False) if module is None else module
    return module, load_weights(entry, module, path)


def refusal(*args, **kwargs) -> ModelError:
    with pytest.raises(ModelError) as info:
        load(*args, **kwargs)
    assert info.value.stage == "weights"
    assert "weights." in info.value.reason
    return info.value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_in_another_form_is_named(tmp_path, kind):
    assert f"holds weight as a {kind} tensor" in refusal(tmp_path, {"weight": ODD[kind]()}).reason


def test_a_key_that_is_no_name_is_shown(tmp_path):
    assert "7 is a key, and no name" in refusal(tmp_path, {"weight": torch.eye(3), 7: torch.eye(3)}).reason


EYE = {"weight": torch.eye(3)}


@pytest.mark.parametrize("file", ["weights.pt", "weights.pth", "weights.bin", "weights.ckpt", "weights.safetensors"])
def test_ordinary_weights_are_loaded(file, tmp_path):
    module, notes = load(tmp_path, EYE, file=file)
    assert torch.equal(module.weight, torch.eye(3))
    assert notes == ()


# --- What strict load_state_dict accepts --------------------------------------------------------------------------------


def test_batch_norm_without_the_number_of_batches(tmp_path):
    # pytorch/pytorch#8481
    state = {
        "weight": torch.full((3,), 2.0),
        "bias": torch.ones(3),
        "running_mean": torch.ones(3),
        "running_var": torch.ones(3),
    }
    module, _ = load(tmp_path, state, torch.nn.BatchNorm1d(3))
    assert module.weight.tolist() == [2, 2, 2]
    assert module.num_batches_tracked == 0


def test_lazy_modules(tmp_path):
    # pytorch/pytorch#147599
    module, _ = load(tmp_path, {"weight": torch.ones(5, 3), "bias": torch.ones(5)}, torch.nn.LazyLinear(5))
    assert module(torch.ones(2, 3)).tolist() == [[4] * 5] * 2


def test_other_dtypes_are_converted_with_a_note(tmp_path):
    module, notes = load(tmp_path, {"weight": torch.eye(3, dtype=torch.float16)})
    assert module.weight.dtype is torch.float32
    assert notes == ("weights are converted as they are loaded: weight (float16 to float32)",)


class Extra(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.said = None

    def get_extra_state(self):
        return {"scale": 2}

    def set_extra_state(self, state):
        self.said = state


def test_extra_state(tmp_path):
    module, _ = load(tmp_path, Extra().state_dict(), Extra())
    assert module.said == {"scale": 2}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_tied_tensors_of_which_the_file_has_one(name, tmp_path):
    module, _ = load(tmp_path, {name: torch.eye(3)}, Tied(), file="weights.safetensors")
    assert torch.equal(module.a.weight, torch.eye(3))
    assert module.a.weight is module.b.weight


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "net.encoder."])
def test_a_prefix_of_all_names_is_left_out_with_a_note(prefix, tmp_path):
    # karpathy/nanoGPT#325
    module, notes = load(tmp_path, {f"{prefix}weight": torch.eye(3)})
    assert torch.equal(module.weight, torch.eye(3))
    assert notes == (f"the names of the weights are taken without the prefix `{prefix}`",)


def test_a_prefix_of_some_names_is_named(tmp_path):
    error = refusal(tmp_path, {"model.weight": torch.eye(3), "loss.weight": torch.eye(3)})
    assert "missing tensors: weight; unexpected tensors: loss.weight, model.weight" in error.reason
    assert "behind the prefix `loss.`" in error.hint or "behind the prefix `model.`" in error.hint


@pytest.mark.parametrize("key", ["state_dict", "model", "ema"])
def test_the_only_state_dict_of_a_checkpoint_is_taken_with_a_note(key, tmp_path):
    module, notes = load(tmp_path, {"epoch": 3, key: EYE, "hyper": {"lr": 0.1}, "optimizer": {"state": {}}})
    assert torch.equal(module.weight, torch.eye(3))
    assert notes == (f"the weights are those under the key {key!r} in weights.pt",)


def test_lightning(tmp_path):
    checkpoint = {"state_dict": {"model.weight": torch.eye(3)}, "epoch": 1, "pytorch-lightning_version": "2.5"}
    module, notes = load(tmp_path, checkpoint, file="weights.ckpt")
    assert torch.equal(module.weight, torch.eye(3))
    assert len(notes) == 2


def test_one_of_several_state_dicts_is_chosen_by_its_key(tmp_path):
    checkpoint = {"raw": {"weight": torch.zeros(3, 3)}, "averaged": {"ema": EYE}, "step": 7}
    error = refusal(tmp_path, checkpoint)
    assert "holds several state dicts: 'raw', 'averaged.ema'" in error.reason
    assert '`weights = "…/weights.pt#averaged.ema"`' in error.hint
    module, notes = load(tmp_path, None, key="averaged.ema")
    assert torch.equal(module.weight, torch.eye(3))
    assert notes == ()
    assert "has no state dict under that key; it has 'raw', 'averaged.ema'" in refusal(tmp_path, None, key="ema").reason


def test_a_checkpoint_in_several_files(tmp_path):
    save_file({"a.weight": torch.eye(3)}, tmp_path / "weights-1.safetensors")
    save_file({"b.weight": torch.eye(3)}, tmp_path / "weights-2.safetensors")
    shards = {"a.weight": "weights-1.safetensors", "b.weight": "weights-2.safetensors"}
    file = "weights.safetensors.index.json"
    two = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "ab"})
    index = json.dumps({"metadata": {}, "weight_map": shards}).encode()
    module, _ = load(tmp_path, index, two, file=file)
    assert torch.equal(module["b"].weight, torch.eye(3))
    entry = ModelSettings(name="net", model="net:Net", inputs={}, weights=file)
    assert entry.files(tmp_path) == [file, *shards.values()]
    (tmp_path / "weights-2.safetensors").unlink()
    assert 'lists the file "weights-2.safetensors", which is missing' in refusal(tmp_path, None, two, file=file).reason
    for bad in ("../weights-1.safetensors", "/etc/passwd", "..", ""):
        index = json.dumps({"weight_map": {"a.weight": bad}}).encode()
        assert "which is not beside it" in refusal(tmp_path, index, two, file=file).reason
        assert entry.files(tmp_path) == [file]
    assert "has no `weight_map`" in refusal(tmp_path, b"{}", two, file=file).reason
    assert "cannot be read" in refusal(tmp_path, b"{", two, file=file).reason


@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors", "weights.safetensors.index.json"])
def test_a_git_lfs_pointer_is_recognised(file, tmp_path):
    # zllrunning/face-parsing.PyTorch#3
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    error = refusal(tmp_path, pointer, file=file)
    assert "is a Git LFS pointer" in error.reason
    assert "git lfs pull" in error.hint


# --- What does not fit ----------------------------------------------------------------------------------------------


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path):
    error = refusal(tmp_path, {"weight": torch.ones(4, 3), "more": torch.ones(1)}, torch.nn.Linear(3, 3))
    assert error.reason.endswith(
        "missing tensors: bias; unexpected tensors: more; other shapes: weight is (4, 3) in the file and (3, 3) in the model"
    )


def test_long_lists_of_names_end_somewhere(tmp_path):
    error = refusal(tmp_path, {f"name{number}": torch.ones(1) for number in range(20)})
    assert error.reason.endswith("name0, name1, name10, name11, name12, name13, name14, name15 and 12 more")


@pytest.mark.parametrize("checkpoint", [[torch.eye(3)], torch.eye(3), {"epoch": 3}, {"epoch": {"a": 1}}, 7])
def test_what_has_no_state_dict_is_refused(checkpoint, tmp_path):
    assert "does not hold a state dict" in refusal(tmp_path, checkpoint).reason


def test_an_empty_state_dict_lacks_everything(tmp_path):
    assert "missing tensors: weight" in refusal(tmp_path, {}).reason


def test_a_whole_pickled_module_is_not_loaded(tmp_path):
    error = refusal(tmp_path, torch.nn.Linear(3, 3))
    assert "cannot be read" in error.reason
    assert "weights_only=True" in error.hint
