"""Forked processes: what a child must not take over from its parent, where other threads ran, which the child lacks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from .thread_state import opaque

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["after_fork", "fork_safe"]


class _Child:
    """The thread that was forked, in a child; None in a process that is none.

    The threads that OpenMP had started for it are gone, and a loop that waits for them waits for ever
    (pytorch/pytorch#49555), so compiled code runs in this one alone. Threads that the child starts get new ones.
    """

    thread: int | None = None


def after_fork(renew: Callable[[], None]) -> None:
    """Call `renew` in every forked child, to make new locks: a thread that the child lacks may have held the old."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def _note_child() -> None:
    _Child.thread = threading.get_ident()


after_fork(_note_child)  # before all others, which are called in the order in which they came


def fork_safe(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, or in a forked child one that computes with one thread where more would never answer."""
    if _Child.thread is None:
        return call
    import torch

    def call_in_child(*values: Any) -> Any:
        if threading.get_ident() != _Child.thread or (threads := torch.get_num_threads()) == 1:
            return call(*values)
        torch.set_num_threads(1)
        try:
            return call(*values)
        finally:
            torch.set_num_threads(threads)

    return opaque("a model", call_in_child)
