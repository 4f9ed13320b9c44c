"""A call of a compiled model: arguments are checked against the contract and laid out, results take eager's structure.

Compiled code reads memory as it was told at build time, whatever it is given: a tensor of another size, dtype or
layout gives wrong numbers without an error (pytorch/pytorch#141115, #153992, #130152). So nothing reaches it here
that the contract does not admit. A call pays for that once: `caller` prepares a short check which passes the ordinary
call; whatever that does not recognise goes through the full one, which lays tensors out or says what is wrong.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from hatch_aoti.runtime.contract import Constant, Group, Omitted, SameAsInput, Size, TensorInput, TensorOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from hatch_aoti.runtime.contract import Node, Signature

__all__ = ["DEFAULT", "Default", "apart", "caller", "check_thread", "opaque"]


class Default:
    """Stands for a default that cannot be written down here (a tensor, an object): leave the argument out."""

    def __repr__(self) -> str:
        return "…"


DEFAULT = Default()

_SIZES = 4096  # sizes of inputs that a model remembers to have passed
_KINDS = 8  # kinds of calls that it remembers, such as from inference mode


def caller(
    name: str,
    signature: Signature,
    run: Callable[[list[torch.Tensor]], Sequence[Any]],
    device_index: int = -1,
) -> Callable[..., Any]:
    """Return a function that takes one value for each parameter of `signature` and answers as eager forward would.

    `run` takes the input tensors as a list and returns the compiled results, one for each leaf of the output.
    `device_index` is the GPU that inputs for a GPU must be on; -1 admits any, as long as they are on the same.
    The function raises TypeError for a wrong type or container, or where PyTorch traces or transforms what is called,
    and ValueError for a wrong value, naming the argument; and what eager raises for values in tensors that cannot be
    computed with, naming the model.
    """
    import torch
    from torch.autograd import forward_ad

    # Asking for the number of threads sets it up in the calling thread, as eager's loops do; compiled ones ask OpenMP,
    # which has a default of its own for each thread (pytorch/pytorch#37259).
    follow_threads = torch.get_num_threads
    inputs = signature.inputs
    if signature.order:
        compiled, places = run, sorted(range(len(inputs)), key=signature.order.__getitem__)

        def run(flat: list[torch.Tensor]) -> Sequence[Any]:
            return compiled([flat[place] for place in places])

    nodes = tuple(parameter.node for parameter in signature.parameters)
    only_tensors = all(isinstance(node, TensorInput) for node in nodes)
    returns_inputs = any(isinstance(leaf, (SameAsInput, Size)) for leaf in signature.outputs)
    rebuild = _rebuilder(signature.output, inputs)
    # What an input that forward changes, that lives on a GPU or that is not row-major needs is more than a look-up.
    simple = bool(inputs) and not any(leaf.changed or leaf.device != "cpu" or leaf.order for leaf in inputs)
    passed = _Passed() if simple and hasattr(forward_ad, "_current_level") else None  # private to PyTorch
    full = functools.partial(_full_call, name, signature, device_index, run, rebuild, passed)
    if passed is None:

        def call(*values: Any) -> Any:
            flat: list[Any] = []
            for node, value in zip(nodes, values, strict=True):
                _flatten(name, node, value, flat)
            return full(flat)

        return opaque(name, call)

    kinds, sizes = passed.kinds, passed.sizes
    function_mode = torch._C._is_torch_function_mode_enabled  # noqa: SLF001
    dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
    output = signature.output
    plain, result = (True, output.index) if isinstance(output, TensorOutput) and not output.state else (False, 0)

    if only_tensors and len(inputs) == 1 and plain:
        # One tensor in, one out. The same conditions as below: sharing them would cost a call.
        def quickest_call(x: Any) -> Any:
            try:
                known = x.shape in sizes
            except Exception:  # noqa: BLE001  (no tensor, or a nested one)
                known = False
            if known and not function_mode() and not dispatch_modes() and forward_ad._current_level < 0:  # noqa: SLF001
                for fits in kinds:
                    if fits(x) and x.is_contiguous() and x.data_ptr():
                        follow_threads()
                        try:
                            return run([x])[result]
                        except RuntimeError as error:
                            raise _as_eager(name, error) from None
            return full([x])

        return opaque(name, quickest_call)

    def quick_call(*values: Any) -> Any:
        if only_tensors:
            flat = list(values)
        else:
            flat = []
            for node, value in zip(nodes, values, strict=True):
                _flatten(name, node, value, flat)
        try:
            known = tuple([x.shape for x in flat]) in sizes
        except Exception:  # noqa: BLE001
            known = False
        if known and not function_mode() and not dispatch_modes() and forward_ad._current_level < 0:  # noqa: SLF001
            for fits in kinds:
                if fits(*flat) and all([x.is_contiguous() and x.data_ptr() for x in flat]):  # noqa: C419  (a list is faster)
                    follow_threads()
                    given = flat.copy() if returns_inputs else ()  # `run` empties its list
                    try:
                        results = run(flat)
                    except RuntimeError as error:
                        raise _as_eager(name, error) from None
                    return results[result] if plain else rebuild(results, given)
        return full(flat)

    return opaque(name, quick_call)


class _Passed:
    """What has passed the full check of a model, so that calls of the same kind and the same sizes need it no more.

    `kinds` are PyTorch's own guards, the ones that `torch.compile` puts before its code. In one C++ call such a guard
    compares exact types, dtypes, devices, ranks, whether gradients are wanted, and the *dispatch keys* of the tensors
    in the calling thread: lazy conjugates and signs, sparse, quantised, nested, zero and wrapped tensors have keys of
    their own, and so have autocast, inference mode, tracing, `torch.func` transforms and dispatch modes.
    `sizes` are those of the one input, or tuples of those of all.
    """

    def __init__(self) -> None:
        self.kinds: list[Callable[..., bool]] = []
        self.sizes: set[Any] = set()

    def add(self, values: Sequence[torch.Tensor], *, kind: bool) -> None:
        """Remember the sizes of `values` and, with `kind`, what else there is to them and to this thread."""
        import torch

        shapes = tuple(value.shape for value in values)
        if len(self.sizes) < _SIZES:
            self.sizes |= {shapes, *shapes[: len(shapes) == 1]}
        guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # noqa: SLF001
        if kind and guards is not None and len(self.kinds) < _KINDS and not any(fits(*values) for fits in self.kinds):
            any_size: list[list[None]] = [[None] * value.ndim for value in values]
            guard = guards(*values, dynamic_dims_sizes=any_size, dynamic_dims_strides=any_size)
            if guard.check(*values):  # never for the same tensor twice
                self.kinds.append(guard.check)


def opaque(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, marked so that `torch.compile` calls it and does not look into it.

    `torch.compiler.disable` does that as well, but imports the compiler, which takes seconds.
    """
    import torch

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    call._torchdynamo_disable_msg = f"{name} is compiled already"  # type: ignore[attr-defined]  # noqa: SLF001
    with contextlib.suppress(AttributeError, TypeError):  # private to PyTorch; without it, there are warnings
        frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001
        frames.set_code_exec_strategy(call.__code__, skip)
    return call


def _full_call(
    name: str,
    signature: Signature,
    device_index: int,
    run: Callable[[list[torch.Tensor]], Sequence[Any]],
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any],
    passed: _Passed | None,
    given: list[Any],
) -> Any:
    """Check every tensor, lay it out as the compiled code reads it, run, write back what forward changed."""
    import torch

    check_thread(name)
    leaves = signature.inputs
    with apart() as kept_apart, torch.no_grad():
        for leaf, value in zip(leaves, given, strict=True):
            _check_tensor(name, leaf, value)
        _check_places(name, leaves, given, device_index)
        _check_sizes(name, signature, given)
        _check_memory(name, leaves, given)
        laid_out = [_lay_out(leaf, value) for leaf, value in zip(leaves, given, strict=True)]
        torch.get_num_threads()  # as in `caller`
        try:
            results = run(laid_out.copy())
        except RuntimeError as error:
            raise _as_eager(name, error) from None
        for leaf, value, used in zip(leaves, given, laid_out, strict=True):
            if leaf.changed and used.data_ptr() != value.data_ptr():
                value.copy_(used)
            elif leaf.changed and not value.is_inference():
                torch.autograd.graph.increment_version(value)  # as in-place operators do, for a backward to come
        answer = rebuild(results, given)
    if passed is not None:
        lazy = any(value.is_conj() or value.is_neg() or value.requires_grad for value in given)
        passed.add(given, kind=not lazy and not kept_apart)
    return answer


# --- The calling thread ---


def check_thread(name: str) -> None:
    """Refuse to run where PyTorch traces, transforms or fakes what is called.

    What compiled code answers would be a constant of the trace; operators that it calls would give it tensors without
    memory.
    """
    import torch

    functorch = torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode  # noqa: SLF001
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001
        where = "torch.jit.trace"
    elif functorch is not None:
        where = f"a torch.func transform ({functorch.key().name.lower()})"
    elif mode(keys.PROXY) or torch._ops._len_torch_dispatch_stack_pre_dispatch():  # noqa: SLF001
        where = "torch.export or make_fx"
    elif mode(keys.FAKE):
        where = "FakeTensorMode, which torch.export uses"
    elif mode(keys.FUNCTIONAL):
        where = "FunctionalTensorMode"
    else:
        return
    raise TypeError(f"{name} cannot be called under {where}: compiled code cannot take part in it")


@contextlib.contextmanager
def apart() -> Iterator[bool]:
    """Keep from compiled code what would reach into the operators that it calls, and change what they return to it:
    autocast (pytorch/pytorch#194329), and modes such as the one that `torch.set_default_device` is.

    Yields whether there is any.
    """
    import torch

    autocast = torch._C._is_any_autocast_enabled()  # noqa: SLF001
    modes = torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
    if not autocast and not modes:
        yield False
        return
    with torch._C._DisableAutocast(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # noqa: SLF001
        yield True


def _as_eager(name: str, error: RuntimeError) -> Exception:
    """Return what eager would raise where compiled code stops: an index out of range, a division by zero.

    Its text begins with the type, where that is not RuntimeError.
    """
    if type(error) is not RuntimeError:  # not from compiled code
        return error
    text = str(error).partition("\n")[0]
    kind: type[Exception] = RuntimeError
    for other in (IndexError, RuntimeError):
        if text.startswith(f"{other.__name__}: "):
            text, kind = text.removeprefix(f"{other.__name__}: "), other
    return kind(f"{name}: {text}")


# --- Arguments ---


def _flatten(name: str, node: Node, value: Any, flat: list[Any]) -> None:
    """Append the tensors in `value` to `flat`; refuse a structure or a constant other than `node`."""
    if isinstance(node, TensorInput):
        flat.append(value)
    elif isinstance(node, Constant):
        _check_constant(name, node, value)
    elif isinstance(node, Omitted):
        if value is not DEFAULT:
            _refuse_type(name, node.path, "must be left out: the model was compiled for its default", value)
    elif isinstance(node, Group):
        for item, part in zip(node.items, _parts(name, node, value), strict=True):
            _flatten(name, item, part, flat)


def _parts(name: str, group: Group, value: Any) -> list[Any]:
    """Return the items of a container in the order of the contract."""
    path, keys, count = group.path, group.keys, len(group.items)
    match group.kind:
        case "tuple" | "list" | "*args":
            kind = list if group.kind == "list" else tuple
            if not isinstance(value, kind):
                _refuse_type(name, path, f"must be a {kind.__name__} of {count}", value)
            if len(value) != count:
                error = TypeError if group.kind == "*args" else ValueError
                raise error(f"{name}: {path} must have {count} item{'s' * (count != 1)}, got {len(value)}")
            return list(value)
        case "dict" | "OrderedDict" | "**kwargs":
            error = TypeError if group.kind == "**kwargs" else ValueError
            if not isinstance(value, dict):
                _refuse_type(name, path, f"must be a dict with the keys {_listed(keys)}", value)
            if missing := [key for key in keys if key not in value]:
                raise error(f"{name}: {path} lacks {_listed(missing)}; it must have {_listed(keys)}")
            if unknown := [key for key in value if key not in keys]:
                raise error(f"{name}: {path} has unknown {_listed(unknown)}; it must have {_listed(keys)}")
            return [value[key] for key in keys]
        case _:  # by its fields: the class may have been imported under another name
            class_name = group.type.rpartition(":")[2]
            fields = (
                value._fields
                if isinstance(value, tuple) and hasattr(value, "_fields")
                else tuple(field.name for field in dataclasses.fields(value) if field.init)
                if dataclasses.is_dataclass(value) and not isinstance(value, type)
                else keys
                if type(value).__qualname__ == class_name.rpartition(".")[2]
                else None
            )
            if fields != keys:
                _refuse_type(name, path, f"must be a {class_name}({', '.join(map(str, keys))})", value)
            return list(value) if isinstance(value, tuple) else [getattr(value, str(key)) for key in keys]


def _listed(keys: Sequence[Any]) -> str:
    return ", ".join(repr(key) for key in keys) or "none"


def _check_constant(name: str, constant: Constant, value: Any) -> None:
    want = constant.value
    if type(value) is not type(want):
        _refuse_type(name, constant.path, f"must be {want!r}, the value that the model was compiled for", value)
    both_nan = value != value and want != want  # noqa: PLR0124  (that is what nan does)
    if value != want and not both_nan:
        raise ValueError(
            f"{name}: {constant.path} must be {want!r}, the value that the model was compiled for, got {value!r}"
        )


def _refuse_type(name: str, path: str, text: str, value: Any) -> NoReturn:
    got = type(value).__name__
    if value is DEFAULT:
        got = "nothing: its default was not compiled in"
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        got = f"{value!r}" if value is None else f"the {got} {value!r}"
    raise TypeError(f"{name}: {path} {text}, got {got}")


def _check_tensor(name: str, leaf: TensorInput, value: Any) -> None:
    """Refuse everything but an ordinary tensor of the right dtype and rank on the right device."""
    import torch

    path, needed = leaf.path, f"must be a tensor {leaf}"
    if not isinstance(value, torch.Tensor):
        hint = ""
        if type(value).__module__.partition(".")[0] == "numpy":
            hint = f" (convert it: torch.as_tensor({path}, dtype=torch.{leaf.dtype}))"
        elif isinstance(value, (bool, int, float, complex)):
            hint = f" (wrap it: torch.tensor({value!r}, dtype=torch.{leaf.dtype}))"
        _refuse_type(name, path, needed + hint, value)
    if type(value) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        _refuse_type(name, path, f"{needed}, not a subclass", value)
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value):  # noqa: SLF001
        raise TypeError(f"{name}: {path} {needed}, got one that a torch.func transform such as vmap has wrapped")
    if value._is_zerotensor():  # noqa: SLF001
        raise TypeError(f"{name}: {path} {needed}, got a zero tensor, which has no memory (pass torch.zeros instead)")
    if value.is_nested:
        raise TypeError(f"{name}: {path} {needed}, got a nested tensor")
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name}: {path} {needed}, stored densely, got a {kind} tensor")
    if str(value.dtype) != f"torch.{leaf.dtype}":
        raise TypeError(f"{name}: {path} {needed}, got {_described(value)} (convert it: {path}.to(torch.{leaf.dtype}))")
    if value.device.type != leaf.device:
        raise ValueError(f"{name}: {path} must be on {leaf.device}, got {_described(value)} on {value.device}")
    if value.ndim != len(leaf.shape):
        raise ValueError(
            f"{name}: {path} {needed}, got {_described(value)}: {_counted(value.ndim)} instead of {len(leaf.shape)}"
        )
    if _is_dual(value):
        raise TypeError(f"{name}: {path} {needed}, got a dual tensor: compiled code computes no tangents (forward AD)")


def _is_dual(value: torch.Tensor) -> bool:
    from torch.autograd import forward_ad

    if getattr(forward_ad, "_current_level", 0) < 0:  # no dual level, as nearly always
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def _check_places(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor], index: int) -> None:
    """Refuse inputs on another GPU than number `index`, or, where that is -1, on different ones.

    PyTorch's loader does not look: kernels would be launched on the GPU that the model was loaded on.
    """
    first = ""
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.device == "cpu":
            continue
        if index < 0:
            index, first = value.device.index, leaf.path
        elif value.device.index != index:
            why = f", since {first} is" if first else ""
            raise ValueError(
                f"{name}: {leaf.path} must be on {leaf.device}:{index}{why}, got {_described(value)} on {value.device}"
            )


def _described(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _counted(rank: int) -> str:
    return f"{rank} dimension{'s' * (rank != 1)}"


def _check_sizes(name: str, signature: Signature, values: Sequence[torch.Tensor]) -> None:
    """Refuse sizes that are not the compiled ones, out of range, or at odds with each other."""
    dims = {dim.name: dim for dim in signature.dims}
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    spots = [
        (size, got, place, leaf, value)
        for leaf, value in zip(signature.inputs, values, strict=True)
        for place, (size, got) in enumerate(zip(leaf.shape, value.shape, strict=True))
    ]

    def refuse(leaf: TensorInput, value: torch.Tensor, place: int, why: str) -> NoReturn:
        raise ValueError(
            f"{name}: {leaf.path} must be {leaf}, got {_described(value)}: "
            f"dimension {place}{f' ({size})' if (size := leaf.shape[place]).terms else ''} {why}"
        )

    # Bare dims define their size for all others, so they come first; then expressions of one dim.
    spots.sort(key=lambda spot: (len(spot[0].terms), spot[0].terms[:1] and spot[0].terms[0][0], spot[0].plus != 0))
    for size, got, place, leaf, value in spots:
        unknown = [(factor, dim) for factor, dim in size.terms if dim not in sizes]
        if len(size.terms) == 1 and unknown:
            [(factor, dim)] = unknown
            solved, rest = divmod(got - size.plus, factor)
            low, high = dims[dim].min, dims[dim].max
            if rest:
                refuse(leaf, value, place, f"is {got}, which is not {size} for any {dim}")
            if solved < low or (high is not None and solved > high):
                refuse(leaf, value, place, f"is {got}, but {dim} must be {_ranged(low, high)}")
            sizes[dim], origin[dim] = solved, leaf.path
        elif got != (want := size.of(sizes)):
            known = ", ".join(f"{origin[dim]} has {dim} = {sizes[dim]}" for _, dim in size.terms)
            refuse(leaf, value, place, f"is {got}, must be {want}" + (f" because {known}" if known else ""))


def _ranged(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


def _check_memory(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor]) -> None:
    """Refuse memory that is not there, and where forward writes, memory that is shared: compiled code assumes that
    each input, and each of its elements, has its own.
    """
    import torch

    for leaf, value in zip(leaves, values, strict=True):
        start, end = _span(value)
        storage = value.untyped_storage()
        if start != end and (not start or end > storage.data_ptr() + storage.nbytes()):
            raise ValueError(
                f"{name}: {leaf.path} must be {leaf}, got {_described(value)} whose storage has only "
                f"{storage.nbytes()} bytes: it was resized, or freed as FSDP does"
            )
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.changed:
            continue
        changed = f"{name}: {leaf.path} is changed in place, but"
        if value.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{changed} it comes from torch.inference_mode() and can be changed only in there: "
                f"pass {leaf.path}.clone()"
            )
        if _overlaps_itself(value):
            raise ValueError(f"{changed} its elements share memory (an expanded view): pass {leaf.path}.clone()")
        for other, another in zip(leaves, values, strict=True):
            if other is not leaf and _overlap(value, another):
                raise ValueError(f"{changed} shares memory with {other.path}: pass {other.path}.clone()")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Say whether two elements share memory. PyTorch's own test gives up where strides interleave."""
    import torch

    known, too_hard = torch._debug_has_internal_overlap(x), 2  # noqa: SLF001
    if known != too_hard:
        return known == 1
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    start, end = _span(x)
    marks = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    _bytes_in(marks, x, start).fill_(True)
    return int(marks.sum()) < x.numel() * x.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors have a byte in common; views of one tensor may lie between each other's elements."""
    import torch

    (a_start, a_end), (b_start, b_end) = (_span(x) for x in (a, b))
    if a_start >= b_end or b_start >= a_end or a.device != b.device:
        return False
    start = min(a_start, b_start)
    marks = torch.zeros(max(a_end, b_end) - start, dtype=torch.bool, device="cpu")
    _bytes_in(marks, a, start).fill_(True)
    return bool(_bytes_in(marks, b, start).any())


def _bytes_in(marks: torch.Tensor, x: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of `marks`, which stands for the memory from the address `start` on, that `x` is of it."""
    size = x.element_size()
    strides = [stride * size for stride in x.stride()]
    return marks.as_strided((*x.shape, size), (*strides, 1), x.data_ptr() - start)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte that `x` uses and of the one after the last; twice the same for none."""
    if x.numel() == 0:
        return 0, 0
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _lay_out(leaf: TensorInput, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as the compiled code reads it: no graph, no lazy conjugate or sign, dimensions in order."""
    plain = value.detach().resolve_conj().resolve_neg()
    if not leaf.order:
        plain = plain.contiguous()
    else:
        back = sorted(range(len(leaf.order)), key=leaf.order.__getitem__)
        plain = plain.permute(leaf.order).contiguous().permute(back)
    # Kernels for GPUs read 16 bytes at a time; a view can start anywhere.
    return plain.clone() if plain.device.type != "cpu" and plain.data_ptr() % 16 else plain


# --- Results ---


def _rebuilder(node: Node, inputs: Sequence[TensorInput]) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Return a function of (compiled results, the input tensors as given) that answers in eager's structure."""
    if isinstance(node, TensorOutput):
        index = node.index
        if node.state:  # the result is the model's own memory: it would change under the caller, and go with the model
            return lambda results, _given: results[index].clone()
        return lambda results, _given: results[index]
    if isinstance(node, SameAsInput):
        place = next(place for place, leaf in enumerate(inputs) if leaf.path == node.path)
        return lambda _results, given: given[place]
    if isinstance(node, Constant):
        value = node.value
        return lambda _results, _given: value
    if isinstance(node, Size):
        spots = {
            leaf_size.terms: (place, dimension)
            for place, leaf in enumerate(inputs)
            for dimension, leaf_size in enumerate(leaf.shape)
            if leaf_size.plus == 0
        }
        terms, plus = [(factor, *spots[((1, dim),)]) for factor, dim in node.terms], node.plus
        return lambda _results, given: plus + sum(factor * given[place].shape[at] for factor, place, at in terms)
    if isinstance(node, Omitted | TensorInput):
        raise TypeError(f"a {type(node).__name__} is no result")
    parts = [_rebuilder(item, inputs) for item in node.items]
    keys = node.keys
    match node.kind:
        case "tuple":
            return lambda results, given: tuple([part(results, given) for part in parts])
        case "list":
            return lambda results, given: [part(results, given) for part in parts]
        case "dict":
            return lambda results, given: {key: part(results, given) for key, part in zip(keys, parts)}  # noqa: B905
        case "OrderedDict":
            return lambda results, given: collections.OrderedDict(
                (key, part(results, given)) for key, part in zip(keys, parts, strict=True)
            )
        case "structseq":
            cls = _class_of(node)
            return lambda results, given: cls([part(results, given) for part in parts])
        case _:
            cls = _class_of(node)
            return lambda results, given: cls(
                **{str(key): part(results, given) for key, part in zip(keys, parts, strict=True)}
            )


def _class_of(group: Group) -> Callable[..., Any]:
    """Return the class of a result: the model's own where its module can be imported, else an equal one."""
    module, _, qualname = group.type.partition(":")
    found: Any
    try:
        found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except Exception:  # noqa: BLE001  (the wheel need not carry the model's source, nor what that imports)
        fields = [str(key) for key in group.keys]
        name = qualname.rpartition(".")[2]
        make: Any = dataclasses.make_dataclass if group.kind == "dataclass" else collections.namedtuple
        found = make(name, fields)
    return found  # type: ignore[no-any-return]  # whatever stands there is what eager returned
