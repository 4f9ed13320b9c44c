"""What a build says about what it has made."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from hatch_aoti.build.progress import Row, human_size
from hatch_aoti.compiler.gpu import architectures, gpu_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.compiler.gpu import BuilderGpu
    from hatch_aoti.job.values import Artifact, ModelResult
    from hatch_aoti.runtime.contract import Signature
    from hatch_aoti.settings.model import ModelSettings, Settings
    from hatch_aoti.wheel.contents import WheelContents
    from hatch_aoti.wheel.platform_tag import TagChoice

__all__ = [
    "announce_debugging",
    "bypasses_cache",
    "explain_devices",
    "explain_tag",
    "note_equal_weights",
    "note_undefined",
    "report_models",
    "warn_of_size",
    "warn_of_tuning",
    "warn_of_vacuous_checks",
]


# What indexes admit by default: PyPI's limit for one file, in bytes.
_INDEX_LIMIT = 100 << 20


# From this size on, in bytes, it is worth saying that an artifact has the weights of another one.
_WORTH_SHARING = 1 << 20


_NO_CONSTANTS = hashlib.sha256().hexdigest()  # what `constants_digest` says of a program without any


def bypasses_cache(settings: Settings) -> bool:
    """Whether artifacts of earlier builds are left aside: what is asked for happens while compiling."""
    return bool(settings.debugging) or settings.keep_intermediates


def announce_debugging(settings: Settings, reporter: Reporter) -> None:
    """Say that models are compiled anew, and that the build is for debugging, if so."""
    if not bypasses_cache(settings):
        return
    asked = [str(settings.debugging)] if settings.debugging else []
    asked += ["keep-intermediates"] if settings.keep_intermediates else []
    reporter.note(f"every model is compiled anew, because of {' and '.join(asked)}")
    if settings.debugging.changes:
        changes = ", ".join(f"{name}={value}" for name, value in settings.debugging.changes.items())
        reporter.warn(f"this is a DEBUG BUILD ({changes}): its compiled code is not what a release has")


def report_models(results: Sequence[ModelResult], reporter: Reporter) -> None:
    """Print the table of artifacts: where they come from, their size, their error against eager."""
    reporter.table(
        Row(
            model=result.name,
            target=artifact.target,
            inputs=_inputs(result.signature),
            size=artifact.size,
            origin="from the cache" if artifact.cached else "compiled",
            error=_error(artifact),
            seconds=reporter.seconds(result.name),
        )
        for result in results
        for artifact in result.artifacts
    )


def _error(artifact: Artifact) -> str:
    if not artifact.record.verified.enabled:
        return "not checked"
    error = artifact.measured.max_error
    return "equal" if error is None else f"{error:.1e}"  # None: no floating point among the results


def warn_of_vacuous_checks(results: Sequence[ModelResult], reporter: Reporter) -> None:
    """Say of which outputs verification shows nothing."""
    for result in results:
        said = dict.fromkeys(text for artifact in result.artifacts for text in artifact.measured.vacuous)
        if said:
            reporter.warn(
                f"{result.name}: verification shows little, since {' and '.join(said)}; look at the weights and at the "
                "`inputs`, and set `atol` if such numbers are meant"
            )


def explain_devices(
    entries: Mapping[str, ModelSettings], devices: Mapping[str, str], gpu: BuilderGpu | None, reporter: Reporter
) -> None:
    """Say what `device = "auto"` came to, and which GPUs will run what is compiled for one."""
    for name, entry in sorted(entries.items()):
        if devices[name] == "cuda" and gpu is not None:
            options = {**gpu_options(gpu, entry.inductor_configs), **entry.inductor_configs}
            reporter.note(
                f"{name}: for cuda, compiled on {gpu.name}; its kernels are {', '.join(architectures(gpu, options))}"
                + ("" if gpu.toolkit else " (fatbinary or nvcc, not found here, would keep PTX for newer GPUs)")
            )
        elif entry.device == "auto":
            reporter.note(f'{name}: `device = "auto"` is cpu here')


def explain_tag(tag: TagChoice, reporter: Reporter) -> None:
    """Say which platform the wheel is for, why, what would make it fit older systems, and what it takes for granted."""
    reporter.note(f"platform tag {tag.tag}: {_demangled(tag.reason)}")
    if tag.lower:
        reporter.note(f"for older systems: {_demangled(tag.lower)}")
    if tag.foreign:
        reporter.warn(
            f"the compiled objects need {', '.join(tag.foreign)}, which neither {tag.tag} nor torch provides: whoever "
            "installs the wheel must have it, in the version of this machine"
        )


def _demangled(text: str) -> str:
    """Replace C++ symbols by what people call them, where binutils' `c++filt` is installed, as it is with most g++."""
    if shutil.which("c++filt") is None:
        return text
    return re.sub(r"\b_Z\w+", lambda symbol: _demangle(symbol[0]), text)


def _demangle(symbol: str) -> str:
    done = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=False)
    return done.stdout.strip() or symbol


def warn_of_tuning(entries: Mapping[str, ModelSettings], reporter: Reporter) -> None:
    """Say which models differ from build to build, since their kernels are chosen by measuring."""
    for name, entry in sorted(entries.items()):
        tuned = sorted(
            option for option, value in entry.inductor_configs.items() if option.startswith("max_autotune") and value
        )
        if tuned and not entry.inductor_configs.get("deterministic"):
            reporter.note(
                f"{name}: `{tuned[0]}` chooses kernels by measuring them here, so another build may choose others and "
                "give another wheel"
            )


def note_undefined(results: Sequence[ModelResult], reporter: Reporter) -> None:
    """Say where a model answers with numbers what eager answers with NaN: no fault, but worth knowing."""
    for result in results:
        calls = dict.fromkeys(call for artifact in result.artifacts for call in artifact.measured.undefined_on)
        if calls:
            reporter.note(
                f"{result.name}: with {' and '.join(calls)}, eager gives NaN, or other integers, where the compiled "
                "model gives numbers"
            )


def note_equal_weights(
    results: Sequence[ModelResult], entries: Mapping[str, ModelSettings], reporter: Reporter
) -> None:
    """Say which models of a bundle have the same weights compiled into each of them, if it is worth the words."""
    owners: dict[tuple[str, str], list[str]] = {}
    for result in results:
        bundle, artifact = entries[result.name].bundle, result.artifacts[0]
        if bundle is not None and artifact.constants is None and artifact.size >= _WORTH_SHARING:
            owners.setdefault((bundle, artifact.record.constants), []).append(result.name)
    for (bundle, constants), names in owners.items():
        if len(names) > 1 and constants != _NO_CONSTANTS:
            reporter.note(
                f"bundle {bundle}: {' and '.join(names)} have the same weights, compiled into each of them; "
                '`constants = "external"` in their tables stores them once (and leaves prepacking out)'
            )


def warn_of_size(contents: WheelContents, reporter: Reporter) -> None:
    """Say that the models are larger than what an index takes, if they are."""
    size = sum(path.stat().st_size for path in contents.artifacts.values()) + sum(map(len, contents.texts.values()))
    if size > _INDEX_LIMIT:
        reporter.warn(
            f"the models take {human_size(size)} in the wheel (before compression, which gains little on weights); "
            f"PyPI, and most other indexes by default, take files up to {_INDEX_LIMIT >> 20} MiB. Ask the index for a "
            "higher limit, or split the models over several distributions"
        )


def _inputs(signature: Signature) -> str:
    """Say in one line what a model takes: `x: float32[batch, 10], batch = 1…1024`."""
    tensors = [f"{leaf.path}: {leaf}" for leaf in signature.inputs]
    return ", ".join([*tensors, *map(str, signature.dims)]) or "none"
