"""A call of a compiled model: arguments are checked against the contract and laid out, results take eager's structure.

Compiled code reads memory as it was told at build time, whatever it is given: a tensor of another size, dtype or
layout gives wrong numbers without an error (pytorch/pytorch#141115, #153992, #130152). So nothing reaches it here
that the contract does not admit. A call pays for that once: `make_call` prepares a short check which passes the
ordinary call; whatever that does not recognise goes through the full one, which lays tensors out or says what is wrong.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .arguments import check_places, check_sizes, check_tensor, flatten
from .contract import SameAsInput, Size, TensorInput, TensorOutput
from .memory import check_memory, lay_out
from .results import as_eager, make_rebuild
from .thread_state import apart, check_thread, opaque

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from .contract import Signature

__all__ = ["make_call"]

_SIZES = 4096  # sizes of inputs that a model remembers to have passed
_KINDS = 8  # kinds of calls that it remembers, such as from inference mode


def make_call(
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
    rebuild = make_rebuild(signature.output, inputs)
    # What an input that forward changes, that lives on a GPU or that is not row-major needs is more than a look-up.
    simple = bool(inputs) and not any(leaf.changed or leaf.device != "cpu" or leaf.order for leaf in inputs)
    passed = _Passed() if simple and hasattr(forward_ad, "_current_level") else None  # private to PyTorch
    full = functools.partial(_full_call, name, signature, device_index, run, rebuild, passed)
    if passed is None:

        def call(*values: Any) -> Any:
            flat: list[Any] = []
            for node, value in zip(nodes, values, strict=True):
                flatten(name, node, value, flat)
            return full(flat)

        return opaque(name, call)

    kinds, sizes = passed.kinds, passed.sizes
    function_mode = torch._C._is_torch_function_mode_enabled  # noqa: SLF001
    dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
    output = signature.output
    plain, result = (True, output.index) if isinstance(output, TensorOutput) and not output.state else (False, 0)

    if only_tensors and len(inputs) == 1 and plain:
        # One tensor in, one out. The same conditions as below: sharing them would cost a call.
        def fast_call_of_one(x: Any) -> Any:
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
                            raise as_eager(name, error) from None
            return full([x])

        return opaque(name, fast_call_of_one)

    def fast_call(*values: Any) -> Any:
        if only_tensors:
            flat = list(values)
        else:
            flat = []
            for node, value in zip(nodes, values, strict=True):
                flatten(name, node, value, flat)
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
                        raise as_eager(name, error) from None
                    return results[result] if plain else rebuild(results, given)
        return full(flat)

    return opaque(name, fast_call)


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
            check_tensor(name, leaf, value)
        check_places(name, leaves, given, device_index)
        check_sizes(name, signature, given)
        check_memory(name, leaves, given)
        laid_out = [lay_out(leaf, value) for leaf, value in zip(leaves, given, strict=True)]
        torch.get_num_threads()  # as in `make_call`
        try:
            results = run(laid_out.copy())
        except RuntimeError as error:
            raise as_eager(name, error) from None
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
