"""Loading a model's file through PyTorch's C++ loader, which takes milliseconds."""

from __future__ import annotations

import importlib
import logging
import zipfile
from typing import TYPE_CHECKING, Any

from .constants import give_own_constants
from .declarations import LoadError
from .integrity import check_present
from .unpacking import alone, cache_folder, temporary_folder, unpacked, utf8_name

if TYPE_CHECKING:
    from torch.export.pt2_archive._package import AOTICompiledModel

    from .declarations import Declaration, Variant

__all__ = ["aoti_load_package", "first_line", "open_loader", "register_operators"]


def open_loader(model: Declaration, variant: Variant, device_index: int = -1) -> Any:
    """Return PyTorch's C++ loader on a variant's file.

    That loader unpacks archives into TMPDIR, keeps them there while it lives, and leaves them behind when it fails or
    the process is killed (pytorch/pytorch#141772). It also takes an unpacked folder, which may go once the code is
    mapped; so the archive is unpacked here, wherever that works: TMPDIR may be full, read-only or mounted noexec.
    """
    import torch

    path = model.folder / variant.file
    check_present(model, path)
    register_operators(model)
    loader_class = getattr(torch._C._aoti, "AOTIModelPackageLoader", None)  # noqa: SLF001
    if loader_class is None:  # a later torch: its own function knows how
        single = model.options.run_single_threaded
        with alone(model, variant) as archive:
            loader = aoti_load_package(utf8_name(archive), run_single_threaded=single, device_index=device_index).loader
        give_own_constants(model, loader.load_constants)
        return loader
    options, failures = model.options, []
    for place in dict.fromkeys([temporary_folder(), cache_folder(), path.parent]):
        try:
            # Debuggers read the file of the code as long as it runs.
            again, keep = not model.signature.state, model.device != "cpu" or bool(model.build.debug)
            with unpacked(model, variant, place, again=again, keep=keep) as folder:
                loader = loader_class(
                    utf8_name(folder), variant.entry, options.run_single_threaded, options.num_runners, device_index
                )
            give_own_constants(model, loader.load_constants)
        except LoadError:
            raise
        except (zipfile.BadZipFile, EOFError) as error:
            raise LoadError(f"{model.name}: {path} is damaged ({error}). Reinstall the package.") from error
        except OSError as error:
            failures.append(f"{place}: {error.strerror or error}")
        except RuntimeError as error:
            if "failed to map segment" not in str(error):
                raise LoadError(
                    f"{model.name}: torch {torch.__version__} cannot load {path}, which torch {model.build.torch} "
                    f"compiled: {first_line(error)}"
                ) from error
            failures.append(f"{place}: does not allow to run code (noexec)")
        else:
            return loader
    tried = "\n".join(f"  {failure}" for failure in failures)
    raise LoadError(
        f"{model.name}: no folder to unpack {path.name} in. Set TMPDIR to one that can be written, has room and "
        f"allows to run code. Tried:\n{tried}"
    )


def register_operators(model: Declaration) -> None:
    """Import the module that the model came from, if compiled code calls custom operators (pytorch/pytorch#145394).

    They are registered when that module is imported, as they were at build.
    """
    import torch

    module = model.source.partition(":")[0]
    for operator in model.operators:
        if operator in torch._C._dispatch_get_all_op_names():  # noqa: SLF001
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise LoadError(
                f"{model.name} calls the operator {operator}, which importing {module} registers; that fails: {error}. "
                f"Install what it needs, or import the module that has the operator before calling {model.name}."
            ) from error


def aoti_load_package(path: str, **options: Any) -> AOTICompiledModel:
    """Call `torch._inductor.aoti_load_package` without its false alarms.

    It warns when no compiler is installed and when the CPU can do more than the model needs
    (pytorch/pytorch#191713); neither matters for a compiled file whose CPU baseline has been checked.
    """
    import torch._inductor

    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("_inductor.package.package", "export.pt2_archive._package")
    ]
    for logger in loggers:
        logger.addFilter(_no_false_alarm)
    try:
        return torch._inductor.aoti_load_package(path, **options)  # noqa: SLF001
    finally:
        for logger in loggers:
            logger.removeFilter(_no_false_alarm)


def _no_false_alarm(record: logging.LogRecord) -> bool:
    return not record.msg.startswith(("Loading outdated pt2 file", "Device information mismatch"))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text: PyTorch's go on with stacks of C++ functions."""
    return (str(error).splitlines() or [""])[0]
