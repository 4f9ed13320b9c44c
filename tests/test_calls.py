"""Calls against contracts: what fits is answered as eager would, everything else is refused by name.

No model is compiled here. `run` stands in for compiled code: it is strict about what reaches it, as compiled code,
which reads memory blindly, cannot be.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_models import Answer, Pair

from hatch_aoti import runtime
from hatch_aoti.runtime.arguments import DEFAULT
from hatch_aoti.runtime.calls import make_call
from hatch_aoti.runtime.contract import (
    Constant,
    Dim,
    Group,
    Omitted,
    Parameter,
    SameAsInput,
    Signature,
    Size,
    TensorInput,
    TensorOutput,
)
from hatch_aoti.runtime.declarations import Variant
from hatch_aoti.wheel.accessor import AccessorModel, _declaration, render

BATCH = Size(((1, "batch"),))
BATCH_DIM = (Dim("batch", 1, 64),)


def fixed(*sizes):
    return tuple(size if isinstance(size, Size) else Size(plus=size) for size in sizes)


def one(node, output=None, dims=BATCH_DIM):
    """Return the signature of a model with one parameter."""
    return Signature((Parameter("x", "positional or keyword", node),), output or TensorOutput(0, "float32", ()), dims)


def tensor(path="x", *sizes, **options):
    return TensorInput(path, options.pop("dtype", "float32"), fixed(*sizes), **options)


def doubled(flat):
    """Stand in for compiled code: check what it is given as far as possible, answer with twice each, empty the list."""
    assert all(type(x) is torch.Tensor and not x.requires_grad and not x.is_neg() and not x.is_conj() for x in flat)
    results = [x * 2 if x.dtype != torch.bool else x.clone() for x in flat]
    flat.clear()
    return results


def unreachable(flat):
    pytest.fail(f"compiled code was run on {flat}")


def refused(signature, *values, error=ValueError):
    with pytest.raises(error) as info:
        make_call("net", signature, unreachable)(*values)
    assert type(info.value) is error
    return str(info.value)


# --- Tensors ---


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(65, 10), ValueError, "dimension 0 (batch) is 65, but batch must be from 1 to 64"),
        (torch.zeros(0, 10), ValueError, "dimension 0 (batch) is 0, but batch must be from 1 to 64"),
        (torch.zeros(8, 11), ValueError, "x must be float32[batch, 10], got float32[8, 11]: dimension 1 is 11, must be 10"),
        (torch.zeros(10), ValueError, "got float32[10]: 1 dimension instead of 2"),
        (torch.zeros(8, 10, dtype=torch.int64), TypeError, "got int64[8, 10] (convert it: x.to(torch.float32))"),
        (torch.zeros(8, 10, dtype=torch.float64), TypeError, "got float64[8, 10]"),
        (torch.zeros(8, 10, device="meta"), ValueError, "x must be on cpu, got float32[8, 10] on meta"),
        (torch.zeros(8, 10).to_sparse(), TypeError, "got a sparse_coo tensor"),
        (np.zeros((8, 10), np.float32), TypeError, "torch.as_tensor(x, dtype=torch.float32)"),
        (3.0, TypeError, "x must be a tensor float32[batch, 10] (wrap it: torch.tensor(3.0, dtype=torch.float32))"),
        (None, TypeError, "got None"),
        ([torch.zeros(10)], TypeError, "got list"),
        (type("Mine", (torch.Tensor,), {})(8, 10), TypeError, "not a subclass, got Mine"),
    ],
)  # fmt: skip
def test_a_tensor_out_of_contract_is_refused_by_name(value, error, text):
    # pytorch/pytorch#141115: stock AOTInductor reads past the end, or reinterprets the bytes
    message = refused(one(tensor("x", BATCH, 10)), value, error=error)
    assert message.startswith("net: x ")
    assert text in message


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(10, 8).t(),
        torch.randn(8, 20)[:, ::2],
        torch.randn(1, 10).expand(8, 10),
        torch.randn(8, 10, requires_grad=True),
        torch.nn.Parameter(torch.randn(8, 10)),
        torch.randn(8, 10, dtype=torch.complex64).conj().imag,
    ],
)
def test_views_and_tensors_that_require_grad_are_laid_out_as_compiled_code_reads_them(value):
    # pytorch/pytorch#153992: compiled code reads the strides of the example
    def run(flat):
        assert flat[0].is_contiguous()
        return doubled(flat)

    got = make_call("net", one(tensor("x", BATCH, 10)), run)(value)
    assert torch.equal(got, value.detach() * 2)
    assert not got.requires_grad


def test_another_layout_than_row_major_is_kept():
    def run(flat):
        assert flat[0].is_contiguous(memory_format=torch.channels_last)
        return doubled(flat)

    call = make_call("net", one(tensor("x", BATCH, 3, 4, 5, order=(0, 2, 3, 1))), run)
    for x in (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        assert torch.equal(call(x), x * 2)


def test_lazy_conjugates_are_resolved():
    x = torch.randn(4, dtype=torch.complex64).conj()
    got = make_call("net", one(tensor("x", 4, dtype="complex64")), doubled)(x)
    assert torch.equal(got, x.resolve_conj() * 2)


def test_vmap_is_refused_by_name():
    call = make_call("net", one(tensor("x", BATCH, 10, dtype="complex64")), unreachable)
    with pytest.raises(TypeError, match=r"net cannot be called under a torch\.func transform \(vmap\)"):
        torch.func.vmap(call)(torch.randn(3, 8, 10, dtype=torch.complex64))


def test_inputs_that_disagree_about_a_dim_are_refused_by_both_names():
    parameters = tuple(Parameter(n, "positional or keyword", tensor(n, BATCH, 4)) for n in "xy")
    signature = Signature(parameters, TensorOutput(0, "float32", ()), BATCH_DIM)
    message = refused(signature, torch.zeros(5, 4), torch.zeros(6, 4))
    assert message.endswith("dimension 0 (batch) is 6, must be 5 because x has batch = 5")


def test_sizes_that_are_expressions_are_checked_against_the_dims_they_come_from():
    d = Size(((1, "d"),))
    parameters = (
        Parameter("y", "positional or keyword", tensor("y", Size(((2, "d"),), 1))),
        Parameter("x", "positional or keyword", tensor("x", d)),
    )
    signature = Signature(parameters, TensorOutput(0, "float32", ()), (Dim("d", 3, 32),))
    assert make_call("net", signature, doubled)(torch.zeros(9), torch.zeros(4)).shape == (9,)
    message = refused(signature, torch.zeros(8), torch.zeros(4))
    assert message.endswith("dimension 0 (2*d + 1) is 8, must be 9 because x has d = 4")


def test_a_dim_that_occurs_only_in_an_expression_is_solved_for():
    signature = one(tensor("x", Size(((2, "d"),), 1)), dims=(Dim("d", 1, 3),))
    assert make_call("net", signature, doubled)(torch.zeros(7)).shape == (7,)
    assert "is 6, which is not 2*d + 1 for any d" in refused(signature, torch.zeros(6))
    assert "is 9, but d must be from 1 to 3" in refused(signature, torch.zeros(9))


def test_a_sum_of_dims_is_checked():
    a, b = Size(((1, "a"),)), Size(((1, "b"),))
    parameters = tuple(
        Parameter(n, "positional or keyword", tensor(n, size))
        for n, size in (("z", Size(((1, "a"), (1, "b")))), ("x", a), ("y", b))
    )
    signature = Signature(parameters, TensorOutput(0, "float32", ()), (Dim("a", 0, None), Dim("b", 0, None)))
    assert make_call("net", signature, doubled)(*(torch.zeros(n) for n in (7, 3, 4))).shape == (7,)
    assert "must be 7 because x has a = 3, y has b = 4" in refused(signature, *(torch.zeros(n) for n in (8, 3, 4)))


# --- Values that are no tensors ---


@pytest.mark.parametrize("value", [True, 1, 1.0, 2 + 1j, "mode", None, float("nan")])
def test_a_constant_accepts_only_its_own_value_and_type(value):
    # pytorch/pytorch#130152: stock AOTInductor drops such arguments
    signature = one(Constant(value, "x"), Constant(0))
    assert make_call("net", signature, doubled)(value) == 0
    for other in (True, 1, 1.0, False, 2, 2.0, "other", None, torch.ones(3), np.float64(1)):
        same = type(other) is type(value) and other == value
        if not same:
            error = ValueError if type(other) is type(value) else TypeError
            message = refused(signature, other, error=error)
            assert f"net: x must be {value!r}, the value that the model was compiled for" in message


def test_a_parameter_with_an_unwritable_default_must_be_left_out():
    signature = one(Omitted("x"), Constant(0))
    assert make_call("net", signature, doubled)(DEFAULT) == 0
    assert "x must be left out" in refused(signature, torch.ones(3), error=TypeError)


# --- Containers ---


@pytest.mark.parametrize(
    ("group", "good", "bad"),
    [
        (("tuple", ()), lambda a, b: (a, b), lambda a, b: [[a, b], (a,), (a, b, b)]),
        (("list", ()), lambda a, b: [a, b], lambda a, b: [(a, b), [a], [a, b, b]]),
        (("dict", ("a", "b")), lambda a, b: {"b": b, "a": a}, lambda a, b: [{"a": a}, {"a": a, "b": b, "c": b}, (a, b)]),
        (("namedtuple", ("first", "second")), Pair, lambda a, b: [(a, b), Answer(a, b)]),
        (("dataclass", ("scores", "note")), Answer, lambda a, b: [(a, b), Pair(a, b)]),
    ],
)  # fmt: skip
def test_containers_must_have_the_kind_length_and_keys_of_the_contract(group, good, bad):
    kind, keys = group
    leaves = (tensor("x.a", 2), tensor("x.b", 3))
    signature = one(
        Group(kind, leaves, keys, "support_models:It", "x"), Group("tuple", (TensorOutput(1, "float32", (3,)),))
    )
    a, b = torch.randn(2), torch.randn(3)
    assert torch.equal(make_call("net", signature, doubled)(good(a, b))[0], b * 2)  # whatever the order of keys
    for value in bad(a, b):
        with pytest.raises((TypeError, ValueError), match="net: x "):
            make_call("net", signature, unreachable)(value)


# --- Results ---


def test_results_come_back_in_eagers_structure():
    # pytorch/pytorch#140615 (dataclasses), #197104 (torch.max)
    out = TensorOutput(0, "float32", (2,))
    keys = ("first", "second")
    output = Group("OrderedDict", (
        Group("namedtuple", (out, Constant(None)), keys, "support_models:Pair"),
        Group("dataclass", (SameAsInput("x"), Constant(3)), ("scores", "note"), "support_models:Answer"),
        Group("structseq", (out, out), ("values", "indices"), "torch.return_types:max"),
        Group("list", (Constant("text"), Size(((1, "batch"),), 1))),
    ), ("a", "b", "c", "d"))  # fmt: skip
    x = torch.randn(2)
    got = make_call("net", one(tensor("x", BATCH), output), doubled)(x)
    assert type(got) is collections.OrderedDict
    assert type(got["a"]) is Pair
    assert torch.equal(got["a"].first, x * 2)
    assert got["b"] == Answer(x, 3)
    assert got["b"].scores is x
    assert type(got["c"]) is torch.return_types.max
    assert got["d"] == ["text", 3]


def test_classes_that_cannot_be_imported_are_replaced_by_equal_ones():
    items = (TensorOutput(0, "float32", (2,)), Constant(1))
    x = torch.randn(2)
    pair = make_call("net", one(tensor("x", 2), Group("namedtuple", items, ("u", "v"), "not.there:Net.Uv")), doubled)(x)
    assert (type(pair).__name__, pair._fields, pair.v) == ("Uv", ("u", "v"), 1)
    data = make_call("net", one(tensor("x", 2), Group("dataclass", items, ("u", "v"), "not.there:Uv")), doubled)(x)
    assert dataclasses.asdict(data)["v"] == 1


def test_the_models_own_memory_is_not_handed_out():
    own = torch.ones(3)
    got = make_call("net", one(tensor("x", 2), TensorOutput(0, "float32", (3,), state="w")), lambda flat: [own])(
        torch.ones(2)
    )
    got.zero_()
    assert own.sum() == 3


# --- Inputs that forward changes ---


def changing(flat):
    flat[0].mul_(2)
    return [flat[0] + 1]


@pytest.mark.parametrize("x", [torch.ones(4, 2), torch.ones(2, 4).t(), torch.ones(4, 4)[:, ::2]])
def test_a_change_in_place_reaches_the_callers_tensor_whatever_its_layout(x):
    signature = one(tensor("x", 4, 2, changed=True), Group("tuple", (TensorOutput(0, "float32", ()), SameAsInput("x"))))
    got, same = make_call("net", signature, changing)(x)
    assert same is x
    assert x.sum() == 16
    assert got.sum() == 24


def test_a_change_in_place_of_a_leaf_that_requires_grad_works_as_under_no_grad():
    x = torch.ones(4, 2, requires_grad=True)
    make_call("net", one(tensor("x", 4, 2, changed=True)), changing)(x)
    assert x.sum().item() == 16


def test_shared_memory_is_refused_where_forward_writes():
    parameters = (
        Parameter("x", "positional or keyword", tensor("x", 4, changed=True)),
        Parameter("y", "positional or keyword", tensor("y", 4)),
    )
    signature = Signature(parameters, TensorOutput(0, "float32", ()))
    t = torch.ones(6)
    assert "x is changed in place, but shares memory with y" in refused(signature, t[:4], t[2:])
    assert "its elements share memory" in refused(signature, torch.ones(1).expand(4), torch.ones(4))
    make_call("net", signature, changing)(t[:4], torch.ones(4))


# --- Properties ---

_NAMES = ("a", "b", "c", "d")


@st.composite
def nodes(draw, path, depth=2):
    """A contract of an argument: a tensor, a constant, or a container of such."""
    choice = draw(st.integers(0, 5 if depth else 2))
    if choice <= 1:
        sizes = st.one_of(
            st.integers(0, 3).map(lambda n: Size(plus=n)),
            st.sampled_from(("m", "n")).map(lambda d: Size(((1, d),))),
            st.builds(
                lambda d, f, p: Size(((f, d),), p), st.sampled_from(("m", "n")), st.integers(1, 3), st.integers(0, 2)
            ),
        )
        shape = tuple(draw(st.lists(sizes, max_size=3)))
        order = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else ()
        dtype = draw(st.sampled_from(("float32", "int64", "bool", "complex64", "bfloat16")))
        return TensorInput(path, dtype, shape, () if order == tuple(range(len(shape))) else order)
    if choice == 2:
        return Constant(draw(st.sampled_from((True, False, 0, 1, 2.0, float("nan"), "s", None))), path)
    count = draw(st.integers(0, 3))
    keys = _NAMES[:count] if choice == 5 else range(count)
    items = tuple(draw(nodes(f"{path}[{key!r}]", depth - 1)) for key in keys)
    return Group({3: "tuple", 4: "list", 5: "dict"}[choice], items, tuple(keys) if choice == 5 else (), "", path)


@st.composite
def signatures(draw):
    """A contract, with an output that has the structure of the arguments and twice their tensors."""
    parameters = []
    for name in _NAMES[: draw(st.integers(1, 4))]:
        node = draw(nodes(name))
        default = node if isinstance(node, Constant) and draw(st.booleans()) else None
        kind = draw(st.sampled_from(("positional", "positional or keyword", "keyword")))
        parameters.append(Parameter(name, kind, node, default))
    rank = {"positional": 0, "positional or keyword": 1, "keyword": 2}
    parameters.sort(key=lambda p: (rank[p.kind], p.kind != "keyword" and p.default is not None))
    without = any(p.default is None and p.kind == "positional or keyword" for p in parameters)
    parameters = [  # no parameter without a default after one that has one
        dataclasses.replace(p, default=None) if without and p.kind == "positional" else p for p in parameters
    ]
    counter = iter(range(1000))

    def answer(node):
        if isinstance(node, Group):
            return dataclasses.replace(node, items=tuple(answer(item) for item in node.items))
        return TensorOutput(next(counter), node.dtype, ()) if isinstance(node, TensorInput) else node

    output = Group("tuple", tuple(answer(parameter.node) for parameter in parameters))
    used = {d for p in parameters for leaf in Signature((p,), output).inputs for s in leaf.shape for _, d in s.terms}
    dims = tuple(Dim(d, low, low + 3) for d, low in (("m", 0), ("n", 1)) if d in used)
    return Signature(tuple(parameters), output, dims)


@functools.cache
def empty_accessor():
    """Return a `_models.py` without models, imported."""
    package: Any = types.ModuleType("p")
    module = types.ModuleType("p._models")
    package._aoti, package.__path__ = runtime, []
    module.__file__, module.__package__ = "p/_models.py", "p"
    sys.modules |= {"p": package, "p._aoti": runtime, "p._models": module}
    text = render([], package="p", torch_version="2.13", system="", machine="", hatch_aoti_version="0")
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def model(signature, run):
    """Return the callable that `_models.py` declares, with `run` in place of the compiled code."""
    module = empty_accessor()
    declared = AccessorModel("net", signature, (Variant("native", "net.pt2"),), "nowhere:Net")
    exec(_declaration(declared), vars(module))
    assert repr(module.net.signature) == repr(signature)  # what is written down is what was read
    module.net._call, module.net._loaded = make_call("net", signature, run), True
    return module.net


def sample(leaf, sizes, chance):
    """A random tensor for a contract, of a random layout."""
    shape = [size.of(sizes) for size in leaf.shape]
    wide = torch.randn([*shape, 2]).mul(3)
    x = wide.to(torch.complex64 if leaf.dtype == "complex64" else torch.float32)
    x = (x > 0 if leaf.dtype == "bool" else x).to(getattr(torch, leaf.dtype))
    x = x[..., 0] if chance.random() < 0.5 else x[..., 0].contiguous()
    if x.ndim > 1 and chance.random() < 0.3:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    if leaf.dtype == "complex64" and chance.random() < 0.3:
        x = x.conj()
    return x.requires_grad_() if x.is_floating_point() and chance.random() < 0.3 else x


def value_of(node, sizes, chance):
    if isinstance(node, TensorInput):
        return sample(node, sizes, chance)
    if isinstance(node, Constant):
        return node.value
    items = [value_of(item, sizes, chance) for item in node.items]
    if node.kind == "dict":
        pairs = list(zip(node.keys, items, strict=True))
        chance.shuffle(pairs)
        return dict(pairs)
    return tuple(items) if node.kind == "tuple" else items


def eager(value):
    """What the uncompiled model answers to an argument: the same structure, with twice the tensors."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return value * 2 if value.dtype != torch.bool else value.clone()
    if isinstance(value, dict):
        return {key: eager(item) for key, item in value.items()}
    return type(value)(map(eager, value)) if isinstance(value, (tuple, list)) else value


def equal(a, b):
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in b)
    if isinstance(b, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or repr(a) == repr(b) == "nan")


def strict_run(signature):
    """Stand in for compiled code that notices every input which it would misread."""

    def run(flat):
        assert len(flat) == len(signature.inputs)
        for leaf, x in zip(signature.inputs, flat, strict=True):
            assert str(x.dtype) == f"torch.{leaf.dtype}"
            assert x.permute(leaf.order or tuple(range(x.ndim))).is_contiguous()
        return doubled(flat)

    return run


def arguments(signature, values, chance):
    """Split values into positional and keyword arguments at random, leaving out defaults at random."""
    args, kwargs, by_name = [], {}, False
    for parameter, value in zip(signature.parameters, values, strict=True):
        left_out = parameter.default is not None and chance.random() < 0.5
        if parameter.kind == "positional":
            if left_out or by_name:
                by_name = True  # nothing can follow by position
                continue
            args.append(value)
            continue
        by_name = by_name or left_out or parameter.kind == "keyword" or chance.random() < 0.5
        if left_out:
            continue
        if by_name:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    names = list(kwargs)
    chance.shuffle(names)
    return args, {name: kwargs[name] for name in names}


_SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@_SETTINGS
@given(signatures(), st.integers(0, 2**32))
def test_a_call_that_fits_is_answered_as_eager_would(signature, seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sizes = {dim.name: chance.randint(dim.min, dim.max) for dim in signature.dims}
    values = [value_of(parameter.node, sizes, chance) for parameter in signature.parameters]
    args, kwargs = arguments(signature, values, chance)
    net = model(signature, strict_run(signature))
    inspect.signature(net).bind(*args, **kwargs)
    for _ in range(2):
        assert equal(net(*args, **kwargs), tuple(map(eager, values)))


def spoil(node, value, chance, sizes):
    """Return `value` with one thing wrong, and the path of the argument that is."""
    if isinstance(node, Group) and node.items and chance.random() < 0.7:
        place = chance.randrange(len(node.items))
        key = node.keys[place] if node.kind == "dict" else place
        wrong, path = spoil(node.items[place], value[key], chance, sizes)
        if node.kind == "dict":
            return {**value, key: wrong}, path
        return type(value)([*value[:place], wrong, *value[place + 1 :]]), path
    if isinstance(node, Group):
        if node.kind == "dict":
            wrong = [list(value.values()), {**value, "unknown": 1}, dict(list(value.items())[1:]) if value else None]
        else:
            wrong = [list(value) if node.kind == "tuple" else tuple(value), type(value)([*value, 1]), None]
        return chance.choice(wrong), node.path
    if isinstance(node, Constant):
        others = [v for v in (True, False, 0, 1, 2.0, 3.5, "s", "t", None, torch.ones(1)) if not equal(v, node.value)]
        return chance.choice([v for v in others if type(v) is not type(node.value) or v != node.value]), node.path
    wrong = [
        torch.zeros(value.shape, dtype=torch.float64), value.unsqueeze(0), np.zeros(3), 3.0, None, value.detach().to("meta"), [value],
    ]  # fmt: skip
    for place, size in enumerate(node.shape):
        shape = list(value.shape)
        ceiling = max((3 + dim for dim in sizes.values()), default=0) * 3 + 3
        shape[place] = size.plus + 1 if not size.terms else size.plus + ceiling
        wrong.append(torch.zeros(shape, dtype=value.dtype))
    return chance.choice(wrong), node.path


@_SETTINGS
@given(signatures(), st.integers(0, 2**32))
def test_a_call_with_one_thing_wrong_is_refused_by_the_name_of_the_argument(signature, seed):
    chance = random.Random(seed)
    sizes = {dim.name: chance.randint(dim.min, dim.max) for dim in signature.dims}
    values = [value_of(parameter.node, sizes, chance) for parameter in signature.parameters]
    place = chance.randrange(len(values))
    values[place], path = spoil(signature.parameters[place].node, values[place], chance, sizes)
    with pytest.raises((TypeError, ValueError)) as info:
        make_call("net", signature, unreachable)(*values)
    related = [leaf.path for leaf in signature.inputs]  # of two inputs that disagree about a dim, either can be named
    assert any(f"net: {name} " in str(info.value) for name in [path, *related])


@_SETTINGS
@given(signatures(), st.integers(0, 2**32))
def test_wrong_arguments_are_refused_by_python_itself(signature, seed):
    chance = random.Random(seed)
    sizes = {dim.name: dim.min for dim in signature.dims}
    values = [value_of(parameter.node, sizes, chance) for parameter in signature.parameters]
    net = model(signature, unreachable)
    positional = [v for p, v in zip(signature.parameters, values, strict=True) if p.kind != "keyword"]
    keyword = {p.name: v for p, v in zip(signature.parameters, values, strict=True) if p.kind == "keyword"}
    with pytest.raises(TypeError, match=r"^net\(\) .*'unknown'"):
        net(*positional, **keyword, unknown=1)
    with pytest.raises(TypeError, match=r"^net\(\) takes"):
        net(*positional, 1, **keyword)
    for parameter in signature.parameters:
        if parameter.default is None and parameter.kind == "keyword":
            with pytest.raises(TypeError, match=rf"^net\(\) missing .*'{parameter.name}'"):
                net(*positional, **{k: v for k, v in keyword.items() if k != parameter.name})


# --- Memory, and what forward writes ---


def changed(*sizes):
    return one(tensor("x", *sizes, changed=True))


def test_a_tensor_without_elements_needs_no_memory():
    x = torch.empty(0, 10)
    assert not x.data_ptr()
    call = make_call("net", one(tensor("x", BATCH, 10), dims=(Dim("batch", 0, 64),)), doubled)
    for _ in range(2):
        assert call(x).shape == (0, 10)


@pytest.mark.parametrize("left", [0, 100])
def test_a_storage_that_was_resized_is_refused(left):
    x = torch.randn(8, 10)
    x.untyped_storage().resize_(left)
    assert f"x must be float32[batch, 10], got float32[8, 10] whose storage has only {left} bytes" in refused(
        one(tensor("x", BATCH, 10)), x
    )


def test_a_freed_storage_is_refused_after_calls_with_the_same_sizes():
    call = make_call("net", one(tensor("x", BATCH, 10)), doubled)
    x = torch.randn(8, 10)
    for _ in range(2):
        assert torch.equal(call(x), x * 2)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="whose storage has only 0 bytes"):
        call(x)


@pytest.mark.parametrize(("sizes", "strides"), [((4, 4), (2, 1)), ((3, 3), (2, 2)), ((2, 3, 4), (3, 5, 1))])
def test_a_change_of_a_tensor_that_overlaps_itself_is_refused(sizes, strides):
    assert torch._debug_has_internal_overlap(torch.zeros(64).as_strided(sizes, strides)) == 2  # torch cannot tell
    message = refused(changed(*sizes), torch.zeros(64).as_strided(sizes, strides))
    assert "x is changed in place, but its elements share memory" in message


@pytest.mark.parametrize(("sizes", "strides"), [((3, 3), (2, 3)), ((2, 3), (5, 2)), ((3, 1, 4), (8, 1, 2))])
def test_a_change_of_a_tensor_whose_strides_only_interleave_is_made(sizes, strides):
    x = torch.zeros(64).as_strided(sizes, strides)

    def run(flat):
        flat[0].add_(1)
        return doubled(flat)

    assert torch.equal(make_call("net", changed(*sizes), run)(x), torch.full(sizes, 2.0))
    assert torch.equal(x, torch.ones(sizes))


def test_a_change_reaches_a_view_that_lies_between_the_elements_of_another():
    base = torch.zeros(4, 6)
    parameters = tuple(Parameter(n, "positional or keyword", tensor(n, 4, 3, changed=n == "x")) for n in ("x", "y"))
    signature = Signature(parameters, TensorOutput(0, "float32", ()), ())

    def run(flat):
        flat[0].add_(1)
        return doubled(flat)

    call = make_call("net", signature, run)
    call(base[:, ::2], base[:, 1::2])
    assert torch.equal(base, torch.tensor([1.0, 0] * 3).expand(4, 6))
    with pytest.raises(ValueError, match="x is changed in place, but shares memory with y"):
        call(base[:, ::2], base[:, 2:5])


def test_a_tensor_of_inference_mode_is_changed_only_in_there():
    with torch.inference_mode():
        x = torch.zeros(3)

    def run(flat):
        flat[0].add_(1)
        return [torch.zeros(3)]

    call = make_call("net", changed(3), run)
    with pytest.raises(ValueError, match=r"x is changed in place, but it comes from torch\.inference_mode"):
        call(x)
    with torch.inference_mode():
        call(x)
    assert x.tolist() == [1, 1, 1]


def test_a_change_in_place_is_noticed_by_a_backward_that_needs_the_old_values():
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (x * weight).sum()
    make_call("net", changed(3), doubled)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_argument_of_several_is_checked_for_memory_and_kind():
    parameters = tuple(Parameter(n, "positional or keyword", tensor(n, BATCH, 4)) for n in "xy")
    call = make_call("net", Signature(parameters, TensorOutput(0, "float32", ()), BATCH_DIM), doubled)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    for _ in range(2):
        assert torch.equal(call(x, y), x * 2)
        assert torch.equal(call(x, x), x * 2)
    with pytest.raises(TypeError, match=r"y must be a tensor .* nested"):
        call(x, torch.nested.nested_tensor([x, x]))
    y.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"y must be .* whose storage has only 0 bytes"):
        call(x, y)


def test_without_pytorchs_guards_every_call_is_checked_in_full(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    call = make_call("net", one(tensor("x", BATCH, 10)), doubled)
    x = torch.randn(8, 10)
    for _ in range(2):
        assert torch.equal(call(x), x * 2)
    with pytest.raises(TypeError, match="got float64"):
        call(x.double())


def test_a_call_after_one_that_failed_is_answered():
    fails = [True]

    def run(flat):
        if fails.pop():
            raise IndexError("index 7 is out of range")
        return doubled(flat)

    call, x = make_call("net", one(tensor("x", BATCH, 10)), run), torch.randn(8, 10)
    with pytest.raises(IndexError, match="index 7"):
        call(x)
    fails.append(False)
    assert torch.equal(call(x), x * 2)
    assert torch.is_grad_enabled()
