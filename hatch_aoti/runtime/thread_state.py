"""What is set in the calling thread and must not reach into compiled code, or does not admit it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["apart", "check_thread", "opaque"]


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
