"""Makes each combination of a kind and a call in a child process of its own, and judges what comes of it.

`python -m hostile_calls.judge FOLDER [--all] [--only TEXT] [--lower]` with the installed wheel in FOLDER. This process
imports torch and the wheel's modules but loads nothing and computes nothing: children are forks of it, each in the
state of a fresh process without the seconds that importing torch takes. A line of JSON for each combination:
`{"id": …, "verdict": "as eager" | "refused" | "fault", "detail": …}`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import re
import select
import signal
import sys
import tempfile
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._subclasses
import torch.export
import torch.func
import torch.fx.experimental.proxy_tensor
import torch.profiler
import torch.testing._internal.two_tensor
from torch.utils import _pytree as pytree

from hostile_calls import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS = 120  # after which a call hangs; a loaded machine takes long for an ordinary one
_REFUSALS = (TypeError, ValueError, IndexError, RuntimeError)
_INTERNAL = re.compile(
    r"INTERNAL ASSERT|run_func_|aoti_torch_|Traceback|model_container|/torch/csrc|_impl\.h|Exception raised from",
    re.IGNORECASE,
)


def combinations(kinds: dict[str, Any], *, everything: bool) -> Iterator[tuple[str, str, int, str]]:
    """Yield (id, kind, place, call): each change at each place that it applies to, and each state.

    Without `everything` a change that has nothing to do with the kind's values is tried on every sixth kind, and a
    state on every fifth, by a checksum of its id, so that the choice does not move when the table grows. What has to do
    with a kind's values is always tried.
    """
    for name, kind in kinds.items():
        leaves = pytree.tree_leaves(kind.inputs())
        for call, change in table.CHANGES.items():
            for place, leaf in enumerate(leaves):
                key = f"{name}-{call}-{place}"
                if change.make(kind, place, leaf.clone()) is NotImplemented:
                    continue
                values = call.startswith(("index_", "offsets_", "divisor_", "dividend_")) or call == "as_is"
                if everything or values or zlib.crc32(key.encode()) % 6 == 0:
                    yield key, name, place, call
        for call in table.STATES:
            key = f"{name}-{call}"
            if everything or zlib.crc32(key.encode()) % 5 == 0:
                yield key, name, -1, call


def outcome(call: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, call()
    except Exception as error:  # noqa: BLE001
        return False, error


def same(got: Any, want: Any) -> bool:
    """Equal structure, types, dtypes, shapes and values, but for what floats lose in another order of operations."""
    flat_got, spec_got = pytree.tree_flatten(got)
    flat_want, spec_want = pytree.tree_flatten(want)
    if spec_got != spec_want or len(flat_got) != len(flat_want):
        return False
    for a, b in zip(flat_got, flat_want, strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return False
            continue
        if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.device != b.device or b.device.type == "meta":
            return False
        plain = [x.detach().as_subclass(torch.Tensor) for x in (a, b)]
        if not torch.allclose(plain[0], plain[1], rtol=1e-4, atol=1e-5, equal_nan=True):
            return False
    return True


def show(result: tuple[bool, Any]) -> str:
    done, what = result
    text = repr(what) if done else f"{type(what).__name__}: {what}"
    return " ".join(text.split())[:300]


def clean(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def judge(kind: Any, model: Any, place: int, call: str, only: str = "") -> tuple[str, str]:
    """Return (verdict, detail) of one call, and of a good one after it.

    With `only` "eager" nothing but eager is called, with "compiled" eager is not, since it is known to end the process:
    then whatever does not is right.
    """
    torch.manual_seed(0)
    eager = kind.make().eval()

    def arguments() -> Any:
        leaves, spec = pytree.tree_flatten(kind.inputs())
        if place >= 0:
            leaves[place] = table.CHANGES[call].make(kind, place, leaves[place])
        return pytree.tree_unflatten(leaves, spec)

    def made(function: Callable[..., Any], given: Any) -> Callable[[], Any]:
        def make() -> Any:
            torch.manual_seed(3)
            return function(*given)

        return make

    if place >= 0:
        way, good, refused, inside = table.CHANGES[call], table.CHANGES[call].good, False, True
        run: Callable[[Callable[[], Any]], Any] = lambda function: function()  # noqa: E731
    else:
        way = table.STATES[call]
        run, good, refused, inside = way.run, way.good, way.refused, way.inside
    given, given_eager = arguments(), arguments()
    eager_call = made(torch.no_grad()(eager) if call != "enable_grad" else eager, given_eager)
    if only != "compiled":
        want = outcome(lambda: run(eager_call)) if inside and not refused else outcome(eager_call)
        if only == "eager":
            return "as eager", ""
    got = outcome(lambda: run(made(model, given)))
    if only == "compiled":
        want = got
        good = refused = False
    verdict, detail = _verdict(model.name, want, got, good, refused)
    if verdict == "as eager" and want[0] and call not in _UNCOMPARABLE and not same(given, given_eager):
        return "fault", f"other arguments after the call: {given} for {given_eager}"[:300]
    if verdict == "fault":
        return verdict, detail
    if not got[0] or call == "forked":  # eager's state moved on, that of the compiled model did not
        torch.manual_seed(0)
        eager = kind.make().eval()
    after = kind.inputs(), kind.inputs()
    want, got = outcome(made(torch.no_grad()(eager), after[0])), outcome(made(model, after[1]))
    if not (want[0] and got[0] and same(got[1], want[1])):
        return "fault", f"a good call after it: {show(got)} for {show(want)}"
    return verdict, detail


_UNCOMPARABLE = {
    "forked",
    "no_storage",
    "short_storage",
    "nested",
    "jagged",
    "sparse_coo",
    "sparse_csr",
    "mkldnn",
    "quantised",
}


def _verdict(name: str, want: tuple[bool, Any], got: tuple[bool, Any], good: bool, refused: bool) -> tuple[str, str]:
    if got[0]:
        if refused:
            return "fault", f"answers {show(got)} where nothing would be right"
        if want[0] and same(got[1], want[1]):
            return "as eager", ""
        return "fault", f"silent: {show(got)} for {show(want)}"
    error = got[1]
    if good and want[0]:
        return "fault", f"refuses what is right: {show(got)}"
    if not isinstance(error, _REFUSALS) or _INTERNAL.search(str(error)):
        return "fault", f"an internal error: {show(got)}"
    if name not in str(error):
        return "fault", f"does not name the model: {show(got)}; eager: {show(want)}"
    if good and not isinstance(error, type(want[1])):
        return "fault", f"another type than eager's: {show(got)}; eager: {show(want)}"
    return "refused", show(got)


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked process, as JSON has it; a fault if that ends by a signal or not at all."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as noise:
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.setpgid(0, 0)
            os.dup2(noise.fileno(), 2)
            os.dup2(noise.fileno(), 1)
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001
                result = ("fault", f"the judge: {type(error).__name__}: {error}"[:400])
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(result).encode())
            os._exit(0)
        os.close(writing)
        data = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], _SECONDS)[0] and (part := pipe.read(65536)):
                data += part
            hangs = not select.select([pipe], [], [], 0)[0]
        with contextlib.suppress(OSError):
            if hangs:
                os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        noise.seek(0)
        words = " ".join(noise.read().decode(errors="replace").split())[-200:]
    if hangs:
        return "fault", f"hangs: {words}"
    if os.WIFSIGNALED(status):
        return "fault", f"{signal.Signals(os.WTERMSIG(status)).name}: {words}"
    return json.loads(data) if data else ("fault", f"ends with status {status}: {words}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--all", action="store_true", help="every combination, not the choice for each test run")
    parser.add_argument("--only", default="", help="combinations whose id this regular expression is found in")
    parser.add_argument("--lower", action="store_true", help="the lowest target of the wheel, not the best")
    options = parser.parse_args()
    sys.path.insert(0, options.folder)
    kinds = importlib.import_module("hostile_wheel.kinds").KINDS
    models = importlib.import_module("hostile_wheel._models")
    kinds = {name: kind for name, kind in kinds.items() if name in models.MODELS}
    if options.lower:
        able = torch.cpu.get_capabilities()
        less = {name: has for name, has in able.items() if not name.startswith(("avx512", "avx2", "fma3"))}
        torch.cpu.get_capabilities = lambda: less
    faults = 0
    # In a child as well: making some of the tensors computes.
    for key, name, place, call in in_child(lambda: list(combinations(kinds, everything=options.all))):
        if not re.search(options.only, key):
            continue
        work = functools.partial(judge, kinds[name], getattr(models, name), place, call)
        verdict, detail = in_child(work)
        if detail.startswith("SIG") and in_child(lambda work=work: work("eager"))[1].startswith("SIG"):
            verdict, detail = in_child(lambda work=work: work("compiled"))
        faults += verdict == "fault"
        print(json.dumps({"id": key, "verdict": verdict, "detail": detail}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
