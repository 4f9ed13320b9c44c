"""Building a released wheel again from its sources, with the tools and settings that it records, to compare the two.

The wheel is untrusted. Of what it says only this reaches the build, after checks: versions of packages, as constraints,
and the variables that stand for settings. Arguments of the compiler do not: they can make it run anything.
Building executes the project's sources, as every build does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hatch_aoti.artifact.untrusted import is_safe_name, open_wheel, printable
from hatch_aoti.codec import encode
from hatch_aoti.errors import AotiError
from hatch_aoti.settings.reader import ENVIRONMENT_PREFIX, SHAPING_VARIABLES
from hatch_aoti.wheel.diff import MemberDifference, compare_wheels
from hatch_aoti.wheel.manifest import MANIFEST, ManifestError, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hatch_aoti.wheel.manifest import Manifest

__all__ = ["Comparison", "Fact", "Release", "find_source", "read_release", "reproduce"]

# What a caller may have set for debugging or compiling that a release build has not: see `debugging`.
_DEBUGGING = ("TORCH_", "TORCHINDUCTOR_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "INDUCTOR_", "DUMP_AOTI_MINIFIER")


@dataclasses.dataclass(frozen=True)
class Release:
    """What a wheel says of itself, as far as a rebuild needs it.

    `facts` are what its bytes depend on besides the sources, by what people call them; `versions` are those of the
    packages that made it; `environment` the variables that stood for settings; `debug` those of a debug build.
    """

    path: Path
    facts: Mapping[str, str]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    debug: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something that the bytes depend on, and that was another for the rebuild; empty where one does not say it."""

    name: str
    released: str
    rebuilt: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of a rebuild: `differences` is empty if, and only if, the wheels are equal byte for byte."""

    released: Path
    rebuilt: Path
    files: int
    differences: tuple[MemberDifference, ...]
    facts: tuple[Fact, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        data = {**dataclasses.asdict(self), "released": str(self.released), "rebuilt": self.rebuilt.name}
        return {"identical": not self.differences, **data}


def read_release(path: Path) -> Release:
    """Read what a wheel records of its build. Raises `AotiError` for what is no sound wheel with models."""
    with open_wheel(path) as wheel:
        name = wheel.the(rf"(.*/)?{re.escape(MANIFEST)}", MANIFEST)
        packed = wheel.the(r"[^/]+\.dist-info/WHEEL", "WHEEL")
        if wheel.problems:
            raise AotiError(
                f"{printable(path)} is not a sound wheel: {wheel.problems[0]}. `hatch-aoti verify` says all."
            )
        data, generator = wheel.read(name), wheel.read(packed).decode("utf-8", "replace")
    try:
        return _release(path, parse_manifest(data), generator)
    except ManifestError as error:
        raise AotiError(f"{printable(path)}: {MANIFEST} {error}.") from error


def _release(path: Path, manifest: Manifest, generator: str) -> Release:
    packer = re.search(r"^Generator: hatchling (\S+)$", generator, re.MULTILINE)
    versions = {"hatch-aoti": manifest.generator.version} | ({"hatchling": packer[1]} if packer else {})
    facts = {f"{package} version": version for package, version in versions.items()}
    facts |= {"Python": manifest.python, "platform tag": manifest.platform_tag}
    if manifest.environment is None:
        raise ManifestError("is of a version of hatch-aoti that did not record what a rebuild takes (`environment`)")
    facts |= {f"variable {name}": value for name, value in manifest.environment.items()}
    for name, model in manifest.models.items():
        facts |= {f"SHA-256 of {file}": digest for file, digest in (model.sources or {}).items()}
        facts |= {f"{name}: GPU, {key}": str(value) for key, value in (encode(model.gpu) or {}).items()}
        targets = ", ".join(artifact.target.name for artifact in model.artifacts)
        facts |= {f"{name}: device": model.device, f"{name}: targets": targets}
        for artifact in model.artifacts:
            toolchain, where = artifact.toolchain, f"{name}, {artifact.target.name}"
            facts |= {
                "torch version": toolchain.torch,
                "torch commit": toolchain.torch_git,
                "C++ compiler": toolchain.compiler,
                "arguments in CXX": toolchain.compiler_arguments,
                **{
                    f"variable {variable} (SHA-256 of its value)": digest
                    for variable, digest in toolchain.environment.items()
                },
                f"{where}: CPU features": " ".join(artifact.target.features),
                f"{where}: folded on": str(encode(artifact.folded_on)),
                f"{where}: seed": str(artifact.seed),
                f"{where}: program": artifact.program,
                f"{where}: constants": artifact.constants,
            }
            facts |= {f"{where}: option {key}": repr(value) for key, value in artifact.options.items()}
            versions["torch"] = toolchain.torch
    return Release(path, facts, versions, manifest.environment, manifest.debug)


def find_source(wheel: Path) -> Path:
    """Return the sdist that lies beside a wheel. Raises `AotiError` if there is none."""
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except (InvalidWheelFilename, InvalidVersion, ValueError) as error:
        raise AotiError(f"{printable(wheel)}: the file's name is none of a wheel: {printable(error)}.") from error
    for path in sorted(wheel.parent.glob("*.tar.gz")):
        stem, _, number = path.name.removesuffix(".tar.gz").rpartition("-")
        with contextlib.suppress(InvalidVersion):
            if canonicalize_name(stem) == name and Version(number) == version:
                return path
    raise AotiError(
        f"there is no sdist of {name} {version} beside {printable(wheel)}: name it, or a checkout of that version, "
        "with --source"
    )


def reproduce(
    release: Release, source: Path, directory: Path, *, isolation: bool, environ: Mapping[str, str]
) -> Comparison:
    """Build `source` (an sdist, or the folder of a project) again as `release` was built, and compare the wheels.

    The rebuilt wheel and the build's log appear in `directory`, which must be empty. With `isolation`, the recorded
    versions of torch, hatchling and hatch-aoti are installed for the build alone; without, those of this environment
    build. Raises `AotiError` if the rebuild fails.
    """
    if release.debug:
        variables = ", ".join(f"{name}={value}" for name, value in sorted(release.debug.items()))
        raise AotiError(
            f"{printable(release.path)} is a debug build ({printable(variables)}): only release builds are reproduced"
        )
    directory = directory.resolve()  # the build runs elsewhere
    log = directory / "rebuild.log"
    with (
        tempfile.TemporaryDirectory(prefix="scratch-", dir=directory) as scratch,
        _unpacked(source, Path(scratch)) as root,
    ):
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("".join(_constraints(release)), encoding="utf-8")
        variables_ = _environment(release, environ, Path(scratch), constraints if isolation else None)
        command = [*_frontend(directory, isolation=isolation), os.fspath(root)]
        with log.open("wb") as output:
            done = subprocess.run(
                command, env=variables_, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
            )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        end = "".join(f"\n    {printable(line)}" for line in said)
        raise AotiError(f"the rebuild failed: `{shlex.join(command)}` ended with status {done.returncode}{end}\n")
    [rebuilt] = wheels
    differences = list(compare_wheels(release.path, rebuilt))
    if release.path.name != rebuilt.name:
        said_ = f"the wheel is called {printable(release.path.name)}, and the rebuilt one {rebuilt.name}"
        differences.insert(0, MemberDifference("", "differs", (said_,)))
    with open_wheel(rebuilt) as wheel:
        files = len(wheel.members)
    facts = tuple(_other_facts(release.facts, read_release(rebuilt).facts)) if differences else ()
    return Comparison(release.path, rebuilt, files, tuple(differences), facts)


def _other_facts(released: Mapping[str, str], rebuilt: Mapping[str, str]) -> Iterator[Fact]:
    """Yield what differs. Of artifacts that only one has, no facts are: the models' targets are, and say it."""
    artifacts = [{_artifact(name) for name in facts} for facts in (released, rebuilt)]
    of_one = artifacts[0] ^ artifacts[1]
    for name in dict.fromkeys([*released, *rebuilt]):
        if _artifact(name) not in of_one and released.get(name) != rebuilt.get(name):
            yield Fact(name, released.get(name, ""), rebuilt.get(name, ""))


def _artifact(fact: str) -> str:
    """Return the artifact, `model, target`, that a fact is about, or an empty string."""
    about = fact.partition(": ")[0]
    return about if ", " in about else ""


def _constraints(release: Release) -> Iterator[str]:
    for package, version in release.versions.items():
        try:
            yield f"{package}=={Version(version)}\n"
        except InvalidVersion as error:
            raise AotiError(
                f"{printable(release.path)} names {printable(version)} as the version of {package}, which is none"
            ) from error


def _environment(
    release: Release, environ: Mapping[str, str], scratch: Path, constraints: Path | None
) -> dict[str, str]:
    """Return the variables of the rebuild: the caller's, without what changes builds, and with what was recorded."""
    unknown = sorted(set(release.environment) - set(SHAPING_VARIABLES))
    if unknown or any("\0" in value for value in release.environment.values()):
        raise AotiError(
            f"{printable(release.path)} records the variable {printable((unknown or ['…'])[0])}, which no setting of "
            "this hatch-aoti reads: use the version that built it"
        )
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith((ENVIRONMENT_PREFIX, *_DEBUGGING)) and name not in SHAPING_VARIABLES
    }
    cache = scratch / "cache"
    cache.mkdir(mode=0o700)
    kept |= {**release.environment, f"{ENVIRONMENT_PREFIX}CACHE_DIR": os.fspath(cache)}
    if constraints is not None:
        # pip of 25.3 and later takes the second for the environments of builds, older ones and `build` the first.
        for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
            # A URL: the variables are lists with blanks between.
            kept[name] = f"{environ.get(name, '')} {constraints.as_uri()}".strip()
    return kept


def _frontend(output: Path, *, isolation: bool) -> list[str]:
    """Return the command that builds a wheel into `output`, but for the folder of the project."""
    if importlib.util.find_spec("build") is not None:
        plain = [] if isolation else ["--no-isolation", "--skip-dependency-check"]
        return [sys.executable, "-m", "build", "--wheel", "--outdir", os.fspath(output), *plain]
    if importlib.util.find_spec("pip") is not None:
        plain = [] if isolation else ["--no-build-isolation"]
        return [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", os.fspath(output), *plain]
    raise AotiError("building again takes the package `build`, or pip: install one of them beside hatch-aoti")


@contextlib.contextmanager
def _unpacked(source: Path, scratch: Path) -> Iterator[Path]:
    """Yield the folder of the project in an sdist, unpacked, or in a folder, as it is."""
    if source.is_dir():
        if not (source / "pyproject.toml").is_file():
            raise AotiError(f"{printable(source)} has no pyproject.toml: name the folder of a project, or an sdist")
        yield source.resolve()
        return
    target = scratch / "source"
    target.mkdir()
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                if not is_safe_name(member.name):
                    raise AotiError(f"{printable(source)}: {printable(member.name)} is no name that may be unpacked.")
            archive.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, ValueError, OSError) as error:
        raise AotiError(f"cannot unpack {printable(source)}: {printable(error)}.") from error
    folders = [path for path in target.iterdir() if (path / "pyproject.toml").is_file()]
    if len(folders) != 1:
        raise AotiError(f"{printable(source)} is not an sdist: it should have one folder with a pyproject.toml.")
    yield folders[0]
    shutil.rmtree(target, ignore_errors=True)
