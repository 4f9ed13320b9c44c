"""Registers the build hook with hatchling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hatchling.plugin import hookimpl

if TYPE_CHECKING:
    from hatch_aoti.plugin.build_hook import AotiBuildHook


@hookimpl
def hatch_register_build_hook() -> type[AotiBuildHook]:
    """Return the hook class; importing it here keeps other hatch commands free of its imports."""
    from hatch_aoti.plugin.build_hook import AotiBuildHook

    return AotiBuildHook
