"""Compiled against eager at build. A stand-in takes the place of the compiled code, so that it can be wrong at will."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from hatch_aoti.errors import ModelError
from hatch_aoti.export import operators
from hatch_aoti.export.program import ExportedModel
from hatch_aoti.export.signature import read_signature
from hatch_aoti.job import verify
from hatch_aoti.job.values import Measured, NotVerified, Verified
from hatch_aoti.settings.model import ModelSettings


class StandIn:
    """Answers like `AOTIModelPackageLoader`, by running the exported program; `spoil` changes its results."""

    def __init__(self, program, spoil):
        self.module, self.spoil = program.module(check_guards=False), spoil

    def boxed_run(self, inputs):
        result = self.module(*inputs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        inputs.clear()
        return self.spoil([value.clone() for value in results])


def checked(monkeypatch, module, args, shapes=None, *, spoil=lambda results: results, **settings):
    """Verify a module; return the verification and the batch sizes that eager saw."""
    module = module.eval()
    output = module(*copy.deepcopy(args))
    program = torch.export.export(module, args, dynamic_shapes=shapes)
    signature = read_signature(
        program, forward=module.forward, args=args, kwargs={}, output=output, dynamic_shapes=shapes
    )
    stand_in = StandIn(program, spoil)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: stand_in)
    sizes = []
    module.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape) if inputs else ()))
    entry = ModelSettings(name="model", model="package:Model", inputs="package:inputs", **settings)
    source = ExportedModel(module, args, {}, shapes, output, program)
    return verify.verify_artifact(Path("model.pt2"), None, source, signature, entry, device="cpu"), sizes


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def batch(low, high):
    return ({0: torch.export.Dim("batch", min=low, max=high)},)


def test_a_right_model_passes_and_the_record_has_no_measured_number(monkeypatch):
    verification, _ = checked(monkeypatch, Double(), (torch.randn(8, 3),), batch(1, 64))
    assert verification.record == Verified(16, rtol=None, atol=None)
    assert verification.measured == Measured(0.0)


def test_both_ends_of_every_range_and_points_between_are_tried(monkeypatch):
    _, sizes = checked(monkeypatch, Double(), (torch.randn(8, 3),), batch(0, 64))
    tried = {size[0] for size in sizes}
    assert {0, 8, 64} <= tried
    assert len(tried) > 3


def test_the_largest_size_is_bounded_by_memory(monkeypatch):
    _, sizes = checked(monkeypatch, Double(), (torch.randn(2, 1 << 16),), batch(1, 1 << 20))
    assert max(size[0] for size in sizes) * (1 << 16) <= 1 << 22


def test_a_wrong_number_fails_with_output_distance_and_input(monkeypatch):
    with pytest.raises(ModelError) as caught:
        checked(monkeypatch, Double(), (torch.ones(4),), spoil=lambda results: [results[0] + 0.5])
    assert caught.value.stage == "verify"
    assert "output differs from eager in 4 of 4 elements, by up to 0.5" in str(caught.value)
    assert "x: float32[4]" in str(caught.value)


def test_a_difference_at_one_end_of_a_range_only_is_found(monkeypatch):
    def spoil(results):
        return [results[0] + 1 if len(results[0]) == 64 else results[0]]

    with pytest.raises(ModelError, match=r"x: float32\[64, 3\]"):
        checked(monkeypatch, Double(), (torch.randn(8, 3),), batch(1, 64), spoil=spoil)


def test_rounding_passes_and_tolerances_can_be_set(monkeypatch):
    def spoil(results):
        return [results[0] * (1 + 1e-5)]

    verification, _ = checked(monkeypatch, Double(), (torch.ones(4),), spoil=spoil)
    assert verification.measured.max_error == pytest.approx(2e-5, rel=0.01)
    with pytest.raises(ModelError, match="allowed"):
        checked(monkeypatch, Double(), (torch.ones(4),), spoil=spoil, rtol=1e-6, atol=0.0)


def test_integers_must_be_equal(monkeypatch):
    with pytest.raises(ModelError, match="1 of 3 elements"):
        checked(
            monkeypatch,
            Double(),
            (torch.tensor([1, 2, 3]),),
            spoil=lambda results: [results[0] + torch.tensor([0, 1, 0])],
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(4, dtype=torch.float64), "is float64[4], eager gives float32[4]"),
        (torch.ones(5), "is float32[5], eager gives float32[4]"),
        (torch.full((4,), torch.nan), "differs from eager in 4 of 4"),
        (torch.ones(4, device="meta"), "is on meta, eager gives it on cpu"),
    ],
)
def test_another_dtype_shape_or_nan_is_no_answer(monkeypatch, value, text):
    with pytest.raises(ModelError) as caught:
        checked(monkeypatch, Double(), (torch.ones(4),), spoil=lambda _: [value])
    assert text in str(caught.value)


class Unsure(nn.Module):
    def forward(self, x):
        return x / x  # NaN for zeros, in eager too


def test_nan_and_infinity_are_answers_too(monkeypatch):
    verification, _ = checked(monkeypatch, Unsure(), (torch.tensor([0.0, 1.0]),))
    assert verification.measured.max_error == 0.0


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def test_state_that_is_not_kept_is_named(monkeypatch):
    """The second call shows what the first cannot: pytorch/pytorch#165444, #169118, #120424."""
    calls = []

    def forget(results):
        calls.append(1)
        return [results[0] - (len(calls) - 1)]  # as if each call were the first

    with pytest.raises(ModelError, match="keeps state between calls in `count`"):
        checked(monkeypatch, Counter(), (torch.zeros(4),), spoil=forget)


def test_state_that_is_kept_passes(monkeypatch):
    verification, _ = checked(monkeypatch, Counter(), (torch.zeros(4),))
    assert verification.record.calls == 2


class Moody(nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x + type(self).calls


def test_an_eager_model_that_contradicts_itself_is_refused(monkeypatch):
    with pytest.raises(ModelError, match="two different answers"):
        checked(monkeypatch, Moody(), (torch.zeros(4),))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_random_operators_are_found_and_compared_with_the_same_seed(monkeypatch):
    program = torch.export.export(Noise(), (torch.zeros(4),))
    assert operators.random_operators(program) == ["aten.rand_like.default"]
    verification, _ = checked(monkeypatch, Noise(), (torch.zeros(4),))
    assert verification.measured.max_error == 0.0


def test_dropout_in_eval_mode_is_not_random():
    program = torch.export.export(nn.Dropout(0.5).eval(), (torch.zeros(4),))
    assert operators.random_operators(program) == []


def test_verification_can_be_turned_off_and_is_recorded_as_such(monkeypatch):
    verification, sizes = checked(
        monkeypatch, Double(), (torch.ones(4),), spoil=lambda results: [results[0] + 1], verify=False
    )
    assert verification == verify.Verification(NotVerified(), Measured(None))
    assert sizes == []


def test_a_compiled_model_that_raises_is_at_fault(monkeypatch):
    def explode(_):
        raise RuntimeError("boom")

    with pytest.raises(ModelError, match="the compiled model raises RuntimeError: model: boom"):
        checked(monkeypatch, Double(), (torch.ones(4),), spoil=explode)


def test_example_values_bound_the_data_that_is_tried(monkeypatch):
    """Indices drawn at random would be out of range in eager, and memory errors in compiled code."""
    table = nn.Embedding(10, 4)
    verification, _ = checked(monkeypatch, table, (torch.arange(8) % 3,), batch(1, 64))
    assert verification.record.calls == 14  # 0, 2, 3 and -1 after the sizes


def test_an_input_that_only_eager_rejects_is_not_the_compiled_models_fault(monkeypatch):
    """deepmodeling/deepmd-kit#5604: indices of the example are out of range for fewer rows."""

    class Rows(nn.Module):
        def forward(self, x, index):
            return x[index]

    shapes = ({0: torch.export.Dim("rows", min=1, max=64)}, None)
    with pytest.raises(ModelError, match=r"eager rejects the sampled input: IndexError: .*x: float32"):
        checked(monkeypatch, Rows(), (torch.randn(8, 3), torch.tensor([0, 7])), shapes)


@pytest.mark.parametrize(
    ("example", "replaces", "text"),
    [
        (torch.ones(4), torch.inf, "on x with inf in it"),
        (torch.ones(4), 0.0, "on x with 0.0 in it"),
    ],
)
def test_a_difference_at_special_values_only_is_found(monkeypatch, example, replaces, text):
    def spoil(results):
        special = results[0].isclose(torch.tensor(2 * replaces), equal_nan=True)
        return [torch.where(special, 7.0, results[0])]

    with pytest.raises(ModelError, match=text):
        checked(monkeypatch, Double(), (example,), spoil=spoil)


def test_a_number_where_eager_gives_nan_is_told_and_no_fault(monkeypatch):
    """oneDNN's fused activations make 0 of NaN (relu) and of -inf * 0."""

    def spoil(results):
        return [torch.where(results[0].isnan(), 0.0, results[0])]

    verification, _ = checked(monkeypatch, Double(), (torch.ones(4),), spoil=spoil)
    assert verification.measured.undefined_on == ("x with nan in it",)


def test_a_compiled_model_that_answers_what_eager_rejects_fails(monkeypatch):
    class Rows(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_exporting() and int(x.min()) < 0:
                raise IndexError("below zero")
            return x * 2

    with pytest.raises(
        ModelError, match="eager raises IndexError: below zero, the compiled model answers, on x with -1"
    ):
        checked(monkeypatch, Rows(), (torch.arange(4),))


class Outputs(nn.Module):
    """Answers with what depends on the input, and with what it is given."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", torch.as_tensor(value))

    def forward(self, x):
        return x + 0, self.value.expand(x.shape) + 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "output[1] is 0 wherever it was compared"),
        (3.0, "output[1] is 3 wherever it was compared"),
        (7, "output[1] is 7 wherever it was compared"),
        (float("nan"), "output[1] is NaN or infinite wherever it was compared"),
        (float("inf"), "output[1] is NaN or infinite wherever it was compared"),
    ],
)
def test_an_output_that_no_check_could_find_wrong_is_pointed_out(monkeypatch, value, said):
    """A head whose weights and bias are zero had "max error 0.0", as if that said something."""
    verification, _ = checked(monkeypatch, Outputs(value), (torch.randn(8, 3),), batch(2, 64))
    assert verification.measured.vacuous == (said,)


class Tiny(nn.Module):
    def forward(self, x):
        return x.tanh() * 1e-14


def test_an_output_below_the_tolerance_is_pointed_out_unless_the_tolerance_is_set(monkeypatch):
    verification, _ = checked(monkeypatch, Tiny(), (torch.randn(8, 3),), batch(2, 64))
    [said] = verification.measured.vacuous
    assert said.startswith("output is at most ")
    assert said.endswith(", less than the difference of 0.0001 that `atol` allows")
    verification, _ = checked(monkeypatch, Tiny(), (torch.randn(8, 3),), batch(2, 64), atol=1e-18)
    assert verification.measured.vacuous == ()


class Flags(nn.Module):
    def forward(self, x):
        return x > -100, x.argmax(1), x.sum()


def test_flags_may_always_be_the_same_and_single_numbers_too(monkeypatch):
    verification, _ = checked(monkeypatch, Flags(), (torch.randn(8, 30),))
    assert verification.measured.vacuous == ()
