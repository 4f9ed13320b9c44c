"""Whether this machine can run a model: its system, its torch, and the best CPU baseline that it has."""

from __future__ import annotations

import platform
import re
from typing import TYPE_CHECKING, Any

from .declarations import LoadError

if TYPE_CHECKING:
    from .declarations import Declaration, Variant

__all__ = ["choose_variant", "major", "minor"]


def choose_variant(model: Declaration) -> Variant:
    """Return the best variant that this machine can run; LoadError says what is missing if there is none."""
    built = model.build
    here = (_system(platform.system()), _machine(platform.machine()))
    if here != (_system(built.system), _machine(built.machine)):
        raise LoadError(
            f"{model.name} was compiled for {built.system} on {built.machine}; this is {platform.system()} on "
            f"{platform.machine()}. Install a wheel that was built for this platform."
        )
    torch = _torch(model)
    able = torch.cpu.get_capabilities()
    for variant in model.variants:
        if all(able.get(feature) for feature in variant.features):
            return variant
    least = model.variants[-1]
    missing = ", ".join(feature for feature in least.features if not able.get(feature))
    raise LoadError(
        f"{model.name} needs {least}; this CPU ({able.get('cpu_name') or platform.machine()}) lacks {missing}. "
        f"Use a wheel built for a lower target."
    )


def _system(name: str) -> str:
    return {"macos": "darwin"}.get(name.lower(), name.lower())


def _machine(name: str) -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower())


def _torch(model: Declaration) -> Any:
    """Import torch, and refuse one that is older than the one that compiled the model."""
    built = model.build.torch
    try:
        import torch
    except ImportError as error:
        raise LoadError(
            f"{model.name} needs torch {minor(built)} or newer, which cannot be imported here ({error}). "
            f'Install it: pip install "torch>={minor(built)}"'
        ) from error
    if _numbers(torch.__version__) < _numbers(built):
        raise LoadError(
            f"{model.name} was compiled with torch {built} and needs torch {minor(built)} or newer; this is torch "
            f'{torch.__version__}. Upgrade it: pip install "torch>={minor(built)}"'
        )
    return torch


def _numbers(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def minor(version: str) -> str:
    """Return `2.13` for `2.13.0+cpu`."""
    return ".".join(map(str, _numbers(version)))


def major(version: str) -> str:
    """Return `12` for `12.6`."""
    return version.partition(".")[0]
