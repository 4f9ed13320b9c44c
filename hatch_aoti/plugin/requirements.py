"""What the wheel must require of torch and Python, read from what the project requires already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import Specifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.requirements import Requirement

__all__ = ["extra_requirement", "installed_torch", "torch_requires_python", "unsupported_pythons"]

# More minor versions of Python 3, and more patch releases of one, than there are.
_MINORS, _PATCHES = 40, 40


def installed_torch() -> Version:
    """Return the version of the installed torch, without importing it. Raises `AotiError` if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Version(version("torch"))
    except (PackageNotFoundError, InvalidVersion) as error:
        raise AotiError(
            'torch is not installed in the build environment; pin it there: `build-system.requires = ["hatchling", '
            '"hatch-aoti", "torch==2.13.0"]`'
        ) from error


def torch_requires_python() -> str:
    """Return the Pythons that the installed torch supports, as it states them (">=3.10"); empty if it does not."""
    from importlib.metadata import metadata

    return str((metadata("torch").get_all("Requires-Python") or [""])[0])


def unsupported_pythons(project: str, torch: str) -> str:
    """Name the Python versions that a project's `requires-python` admits and torch's rules out as too old.

    Generated code runs on every Python that torch supports. A project that states nothing is taken to mean those.
    """
    if not project or not torch:
        return ""
    admitted, supported = SpecifierSet(project), SpecifierSet(torch)
    minors = ["2.7", *(f"3.{minor}" for minor in range(_MINORS))]
    oldest = next((place for place, minor in enumerate(minors) if _admits(supported, minor)), 0)
    return ", ".join(minor for minor in minors[:oldest] if _admits(admitted, minor))


def _admits(specifiers: SpecifierSet, minor: str) -> bool:
    return any(specifiers.contains(f"{minor}.{patch}") for patch in range(_PATCHES))


def extra_requirement(requirements: Iterable[Requirement], torch: Version) -> str | None:
    """Return the requirement on torch to add to the wheel, or None where the project's own says enough.

    A compiled model needs at least the torch minor that compiled it: an older torch may lack functions that it calls.
    One for a GPU also needs a torch with CUDA, which no requirement can express: builds with and without it are told
    apart by a local version, that `>=` does not see. The accessor says it when the model is loaded.
    Raises `AotiError` if the project's requirement excludes the torch that compiles.
    """
    floor = Version(f"{torch.major}.{torch.minor}")
    specifiers = SpecifierSet()
    for requirement in requirements:
        if canonicalize_name(requirement.name) != "torch":
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        if requirement.specifier and not requirement.specifier.contains(torch, prereleases=True):
            raise AotiError(
                f'`project.dependencies` has "{requirement}", which excludes torch {torch}, the one in the build '
                "environment that compiles the models. Pin a torch in `build-system.requires` that the requirement "
                f"admits, or widen the requirement to admit {torch.public}"
            )
        specifiers &= requirement.specifier
    return None if any(_floors(clause, floor) for clause in specifiers) else f"torch>={floor}"


def _floors(clause: Specifier, floor: Version) -> bool:
    """Say whether a version clause rules out everything below `floor`."""
    if clause.operator not in {"==", "===", "~=", ">=", ">"}:
        return False
    try:
        return Version(clause.version.removesuffix(".*")) >= floor
    except InvalidVersion:
        return False
