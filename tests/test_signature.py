"""What `read_signature` reads from exported programs."""

from __future__ import annotations

import collections
import json

import pytest
import torch
from support_models import Answer, Everything, Mlp, Pair, export, signature_of
from torch import nn
from torch.utils import _pytree

from hatch_aoti.compiler.serialise import inductor_options, make_serialisable, plain_containers
from hatch_aoti.errors import UnsupportedModelError
from hatch_aoti.runtime.contract import Constant, Dim, Omitted, SameAsInput, Signature, Size, TensorOutput


def module(forward, **tensors):
    """Return a module with the given forward, parameters and buffers."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            made.register_parameter(name, tensor)
        else:
            made.register_buffer(name, tensor)
    return made


@pytest.fixture(scope="module")
def everything() -> Signature:
    return signature_of(Everything(), *Everything.example())


def test_signature_of_a_dynamic_model_names_its_dim_after_the_user():
    batch = torch.export.Dim("batch", min=1, max=1024)
    signature = signature_of(Mlp(), (torch.randn(8, 10),), dynamic_shapes=({0: batch},))
    assert str(signature) == "(input: float32[batch, 10]) -> float32[batch, 1]\n  where batch = 1…1024"
    assert signature.dims == (Dim("batch", 1, 1024),)
    assert signature.inputs[0].shape == (Size(((1, "batch"),)), Size(plus=10))


def test_signature_survives_json(everything):
    assert Signature.from_json(json.loads(json.dumps(everything.to_json()))) == everything


def test_constants_survive_json_with_their_types():
    for value in (True, 1, 1.0, float("inf"), 1 + 2j, "x", None):
        read = Signature.from_json(json.loads(json.dumps(Signature((), Constant(value)).to_json())))
        assert read.output == Constant(value)
        assert type(read.output.value) is type(value)


def test_state_and_changed_inputs_are_named(everything):
    # pytorch/pytorch#165444, #169118, #120424: in-place operators stay in the exported graph, unannounced
    assert everything.state == ("count",)
    assert [leaf.path for leaf in everything.inputs if leaf.changed] == ["x"]
    assert "keeps state between calls: count" in str(everything)
    assert inductor_options(everything)["joint_graph_constant_folding"] is False


def test_a_model_without_state_needs_no_options():
    assert inductor_options(signature_of(nn.Linear(2, 2), (torch.randn(1, 2),))) == {}


@pytest.mark.parametrize(("least", "options"), [(0, {"aot_inductor.check_lowerbound": False}), (2, {})])
def test_pytorchs_own_check_of_inputs_leaves_sizes_of_1_to_the_accessor(least: int, options: dict[str, bool]):
    sizes = {"input": {0: torch.export.Dim("n", min=least, max=8)}}
    assert inductor_options(signature_of(nn.Linear(2, 2), (torch.randn(3, 2),), dynamic_shapes=sizes)) == options


def test_outputs_say_where_each_result_comes_from(everything):
    pair, answer, largest, rest = everything.output.items
    assert (pair.kind, pair.type, pair.keys) == ("namedtuple", "support_models:Pair", ("first", "second"))
    assert pair.items[1] == SameAsInput("p")
    assert (answer.kind, answer.items[1]) == ("dataclass", Constant("fixed"))
    assert (largest.kind, largest.type, largest.keys) == ("structseq", "torch.return_types:max", ("values", "indices"))
    same, weight, view, nothing, seven, count = rest.items
    assert same == SameAsInput("x")
    assert (weight.state, view.state, count.state) == ("weight", "weight", "count")
    assert (nothing, seven) == (Constant(None), Constant(7))


def test_parameters_keep_kinds_and_defaults(everything):
    assert [(p.name, p.kind, p.default) for p in everything.parameters] == [
        ("batch", "positional or keyword", None),
        ("x", "positional or keyword", None),
        ("flag", "positional or keyword", Constant(True, "flag")),
        ("p", "keyword", None),
    ]
    assert everything.constants == (Constant(True, "flag"),)  # left out at the export


def test_a_default_that_is_no_plain_value_must_be_left_out():
    default = torch.ones(3)

    def forward(self, x, w=default):
        return x * w

    [_, w] = signature_of(module(forward), (torch.randn(3),)).parameters
    assert w.node == w.default == Omitted("w")


def test_collected_arguments_become_groups_of_their_own_kind():
    def forward(self, x, *xs, **named):
        return x + xs[0] + xs[1] + named["k"]

    x = [torch.randn(2) for _ in range(4)]
    signature = signature_of(module(forward), tuple(x[:3]), {"k": x[3]})
    assert [leaf.path for leaf in signature.inputs] == ["x", "xs[0]", "xs[1]", "named['k']"]
    assert [p.node.kind for p in signature.parameters[1:]] == ["*args", "**kwargs"]


def test_keyword_examples_in_another_order_than_the_parameters_keep_the_order_of_the_compiled_code():
    def forward(self, x, y, *, z):
        return x + y.sum() + z.sum()

    kwargs = {"z": torch.randn(3), "y": torch.randn(2), "x": torch.randn(1)}
    signature = signature_of(module(forward), (), kwargs)
    assert [leaf.path for leaf in signature.inputs] == ["x", "y", "z"]
    assert signature.order == (2, 1, 0)


def test_sizes_may_be_expressions_of_dims():
    def forward(self, x, y):
        return x + y[1:]

    d = torch.export.Dim("d", min=3, max=32)
    signature = signature_of(module(forward), (torch.randn(5), torch.randn(6)), dynamic_shapes=({0: d}, {0: d + 1}))
    assert [str(leaf) for leaf in signature.inputs] == ["float32[d]", "float32[d + 1]"]


def test_a_dim_may_occur_only_in_an_expression():
    def forward(self, x):
        return x.view(-1, 2).sum(1)

    d = torch.export.Dim("d", min=2, max=20)
    signature = signature_of(module(forward), (torch.randn(8),), dynamic_shapes=({0: 2 * d},))
    assert str(signature) == "(x: float32[2*d]) -> float32[d]\n  where d = 2…20"


def test_dims_inside_containers_keep_their_names():
    def forward(self, xs, named):
        return xs[0] + xs[1] + named["k"]

    b = torch.export.Dim("batch", max=64)
    xs, named = [torch.randn(3, 2), torch.randn(3, 2)], {"k": torch.randn(3, 2)}
    signature = signature_of(module(forward), (xs, named), dynamic_shapes=([{0: b}, {0: b}], {"k": {0: b}}))
    assert {str(leaf) for leaf in signature.inputs} == {"float32[batch, 2]"}


def test_unnamed_dims_are_named_after_argument_and_place():
    def forward(self, x):
        return x * 2

    signature = signature_of(module(forward), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert str(signature.inputs[0]) == "float32[x_0, 3]"
    assert signature.dims == (Dim("x_0", 2, None),)


def test_a_number_among_the_results_may_be_a_size():
    def forward(self, x):
        return x * 2, x.shape[0]

    n = torch.export.Dim("n", min=1, max=9)
    signature = signature_of(module(forward), (torch.randn(4, 2),), dynamic_shapes=({0: n},))
    assert signature.output.items[1] == Size(((1, "n"),))


@pytest.mark.parametrize(
    ("example", "order"),
    [
        (torch.randn(2, 3, 4, 4), ()),
        (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.randn(3, 2).t(), (1, 0)),
        (torch.randn(1, 3).t(), ()),
    ],
)
def test_the_layout_of_the_example_is_part_of_the_contract(example, order):
    # pytorch/pytorch#153992
    assert signature_of(module(lambda self, x: x * 2), (example,)).inputs[0].order == order


def _unsupported():
    same = torch.randn(3)
    auto = torch.export.Dim.AUTO

    def add(self, x, y):
        return x + y

    yield "overlap", (lambda self, x: x * 2), (torch.randn(1, 3).expand(2, 3),), None, "x has elements that overlap"
    yield "gaps", (lambda self, x: x * 2), (torch.randn(8)[::2],), None, "x has elements that overlap or leave gaps"
    yield "one for two", add, (same, same), None, "same tensor for x and y"
    yield "integer", (lambda self, x, n: x * n), (same, 4), ({}, torch.export.Dim.DYNAMIC), "input n is a int"
    yield (
        "even",
        (lambda self, x: x.view(2, -1).sum(0)),
        (torch.randn(8),),
        ({0: auto},),
        r"x\.size\(\)\[0\] % 2\) == 0",
    )
    yield "number", (lambda self, x: (x, x.sum().item())), (same,), None, r"output\[1\] is a number that is computed"


@pytest.mark.parametrize(("forward", "args", "shapes", "text"), [pytest.param(*c[1:], id=c[0]) for c in _unsupported()])
def test_what_a_compiled_call_cannot_keep_is_refused_by_name(forward, args, shapes, text):
    # pytorch/pytorch#130152 (inputs that are no tensors), #153992 (strides)
    with pytest.raises(UnsupportedModelError, match=text):
        signature_of(module(forward), args, dynamic_shapes=shapes)


def test_unknown_containers_are_refused_by_name():
    def forward(self, x):
        return collections.deque([x * 2])

    with pytest.raises(UnsupportedModelError, match=r"output is a collections\.deque"):
        signature_of(module(forward), (torch.randn(2),))


def test_every_container_becomes_one_that_aotinductor_can_serialise():
    # pytorch/pytorch#197104 (torch.max), #140615 (dataclasses); named tuples fail in the same way
    program, output, _ = export(Everything(), *Everything.example())
    info = make_serialisable(program.module(check_guards=False)).graph._codegen.pytree_info
    assert _pytree.treespec_loads(_pytree.treespec_dumps(info.out_spec)) == info.out_spec
    assert plain_containers(output)["pair"].__class__ is tuple


def test_inputs_become_plain_together_with_their_spec():
    def forward(self, p, answer):
        return p.first + answer.scores

    args = (Pair(torch.randn(2), None), Answer(torch.randn(2), 3))
    program, _, signature = export(module(forward), args)
    info = make_serialisable(program.module(check_guards=False)).graph._codegen.pytree_info
    assert _pytree.tree_structure(plain_containers(program.example_inputs)) == info.in_spec
    assert [leaf.path for leaf in signature.inputs] == ["p.first", "answer.scores"]
    assert signature.constants == (Constant(None, "p.second"), Constant(3, "answer.note"))


def test_views_of_the_models_own_memory_are_marked():
    def forward(self, x):
        return self.w.t(), self.w.unbind(0), x + 1, x[1:]

    signature = signature_of(module(forward, w=nn.Parameter(torch.randn(2, 3))), (torch.randn(2),))
    states = [leaf.state for leaf in signature.outputs if isinstance(leaf, TensorOutput)]
    assert states == ["w", "w", "w", "", ""]
