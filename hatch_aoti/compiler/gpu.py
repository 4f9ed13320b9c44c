"""The device that models are compiled for: the CPU, or the GPU that torch finds on the builder.

Only torch knows whether it can use a GPU, and the build does not import it: `find_gpu` asks once per build, in a
process of its own, and only where a model wants a GPU. What that GPU is becomes part of every request, so that results
of a machine with another GPU, or with none, are not taken for this one's.

Facts about torch are from 2.13: Triton compiles kernels for the compute capability of the GPU it finds, and for nothing
else. With `aot_inductor.emit_multi_arch_kernel` torch keeps the PTX of each kernel next to it, which drivers compile
for newer GPUs (`torch/_inductor/codecache.py`, `_compile_fatbin`); that takes `fatbinary` or `nvcc`, of the CUDA
toolkit. From compute capability 9.0 on Triton's kernels, and their PTX, are for just that capability (`sm_90a`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hatch_aoti.codec import pack, unpack
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["BuilderGpu", "GpuRecord", "architectures", "find_gpu", "gpu_options", "resolve_devices"]

_MULTI_ARCHITECTURE = "aot_inductor.emit_multi_arch_kernel"


@dataclasses.dataclass(frozen=True)
class BuilderGpu:
    """A GPU that models are compiled on, and the tools: recorded in the manifest and part of every cache key.

    `capability` is its compute capability (`"8.0"`), `cuda` the version that torch was built with, `triton` that of the
    package, `toolkit` what the tool that packs kernels for several GPUs says of its version; empty if there is none.
    """

    name: str
    capability: str
    cuda: str
    triton: str
    toolkit: str


@dataclasses.dataclass(frozen=True)
class GpuRecord(BuilderGpu):
    """What the manifest says about the GPU that a model was compiled on, and which GPUs run the result."""

    architectures: tuple[str, ...]


def resolve_devices(
    entries: Mapping[str, ModelSettings], find: Callable[[], BuilderGpu | str]
) -> tuple[dict[str, str], BuilderGpu | None]:
    """Return the device of each model, `cpu` or `cuda`, and the GPU if any has the latter.

    `find` is called only if a model asks for a GPU; it answers as `find_gpu` does. Raises `AotiError` with the keys of
    all models that must have a GPU, where there is none.
    """
    wanting = {name: entry.device for name, entry in sorted(entries.items()) if entry.device != "cpu"}
    devices = dict.fromkeys(entries, "cpu")
    if not wanting:
        return devices, None
    gpu = find()
    if isinstance(gpu, BuilderGpu):
        return {**devices, **dict.fromkeys(wanting, "cuda")}, gpu
    keys = [f"`tool.aoti.models.{name}.device`" for name, device in wanting.items() if device == "cuda"]
    if keys:
        raise AotiError(
            f'{", ".join(keys)}: "cuda" needs a GPU where the wheel is built, and {gpu}. Build on a machine with an '
            'NVIDIA GPU and a CUDA build of torch, or write device = "auto" or "cpu".'
        )
    return devices, None


def gpu_options(gpu: BuilderGpu | None, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inductor options for code that runs on more than the builder's GPU, where torch can make it.

    `configured` are the model's own `inductor-configs`, which win. CUTLASS kernels exclude it: torch asserts that.
    """
    if gpu is None or not gpu.toolkit or _MULTI_ARCHITECTURE in configured:
        return {}
    if "CUTLASS" in str(configured.get("max_autotune_gemm_backends", "")).upper():
        return {}
    return {_MULTI_ARCHITECTURE: True}


def architectures(gpu: BuilderGpu, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a model's kernels are for, in the words of nvcc and `torch.cuda.get_arch_list()`.

    `sm_80` is code for compute capability 8.0 and later ones of 8; `compute_80` is PTX, which a driver compiles for 8.0
    and everything newer; a final `a` means this very capability. `options` are the inductor options of the model.
    """
    number = gpu.capability.replace(".", "")
    if int(number) >= 90:
        number += "a"
    return (f"sm_{number}", *([f"compute_{number}"] if options.get(_MULTI_ARCHITECTURE) else []))


def find_gpu(environ: Mapping[str, str]) -> BuilderGpu | str:
    """Return the GPU that torch uses by default; or, as the end of a sentence, why there is none."""
    boot = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hatch_aoti.compiler.gpu import _main; _main()"
    done = subprocess.run(
        [sys.executable, "-c", boot, json.dumps(sys.path)],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return f"asking torch for one failed: {last}"
    return unpack(_Answer, json.loads(lines[-1])).found


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What the process that asks torch has found: a GPU, or why there is none."""

    found: BuilderGpu | str


def _main() -> None:
    sys.stdout.write(f"\n{json.dumps(pack(_Answer(_ask_torch())))}\n")


def _ask_torch() -> BuilderGpu | str:
    import torch

    if torch.version.cuda is None:
        kind = "for ROCm, which is not supported" if torch.version.hip else "without CUDA"
        return f"the torch in the build environment ({torch.__version__}) is built {kind}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no GPU, all of them hidden
        return f"torch {torch.__version__} cannot use one here: {(str(error).splitlines() or ['no reason given'])[0]}"
    return BuilderGpu(name, f"{major}.{minor}", torch.version.cuda, _version("triton"), _toolkit(os.environ))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _toolkit(environ: Mapping[str, str]) -> str:
    """Return the version of the tool that torch would pack kernels with, as it names it; empty if there is none.

    torch takes `nvcc` from CUDACXX or PATH (`torch/_inductor/codegen/cuda/compile_utils.py`, `_cuda_compiler`), and
    prefers `fatbinary`, next to it or on PATH.
    """
    path = environ.get("PATH", os.defpath)
    nvcc = shutil.which(environ.get("CUDACXX", ""), path=path) or shutil.which("nvcc", path=path)
    beside = nvcc and shutil.which("fatbinary", path=os.path.dirname(nvcc))  # noqa: PTH120
    tool = beside or shutil.which("fatbinary", path=path) or nvcc
    if tool is None:
        return ""
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (said.strip().splitlines() or [""])[-1]
