"""Programs saved by `torch.export.save`: looked through as data, before torch loads anything of them.

`torch.export.load` runs what a file tells it to, in more ways than its warning about pickles names (torch 2.13):

    data/sample_inputs/model.pt, weights with `use_pickle`   unpickled, in the end with `weights_only=False`
    data/constants/custom_obj_*, opaque objects              unpickled by torchbind and by `pickle.loads`
    sizes (`expr_str`)                                       given to `sympy.sympify`, which is `eval`
    guards (`guards_code`)                                   compiled as Python
    operators (`target`)                                     any attribute that `torch.` leads to, verified later
    names of nodes and arguments                             written into the source of `forward`, and into C++
    containers (`in_spec`, `out_spec`)                       some import a module that they name
    data/aotinductor/                                        shared objects, opened at once

Here each of them is held against the small vocabulary that `torch.export.save` itself uses, and what passed is copied
into a new archive, with nothing else in it: torch never sees the file that came from elsewhere, so it cannot read that
in another way than it was read here.
"""

from __future__ import annotations

import json
import keyword
import re
import shutil
import sys
import zipfile
from typing import TYPE_CHECKING, Any, Final

from hatch_aoti.artifact.archive import read_package
from hatch_aoti.errors import SAVE_AGAIN, AotiError, SavedProgramError
from hatch_aoti.export.saved_expressions import UNTRUSTED, check_guard, check_size, nodes
from hatch_aoti.export.saved_pickles import checked_pickle, custom_object, imports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["copy_checked"]


_PROGRAM: Final = "models/model.json"
_INPUTS: Final = "data/sample_inputs/model.pt"
_PAYLOADS: Final = {  # where the tensors are described, their folder, and how the files there are called
    "data/weights/model_weights_config.json": ("data/weights/", "weight_"),
    "data/constants/model_constants_config.json": ("data/constants/", "tensor_"),
}
_NEWEST_CONTAINER: Final = 10  # kMaxSupportedFileFormatVersion of caffe2/serialize/versions.h

# Everything that is no expression: no way to write a call, a string or a second statement, in Python or in C++.
_PLAIN: Final = re.compile(r"[\w .,:+\-<>=/]*")

_OPERATORS: Final = re.compile(r"torch\.ops\.(?:aten|prims)\.\w+\.\w+|math\.[a-z]\w*|torch\._?sym_\w+")
_FILE_OPERATORS: Final = ("torch.ops.aten.from_file.", "torch.ops.aten.save.")
_PYTHON_OPERATORS: Final = frozenset(
    f"_operator.{name}"
    for name in (
        "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "invert", "le", "lshift", "lt", "mod", "mul",
        "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
    )
)  # fmt: skip
_HIGHER_ORDER: Final = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in (
        "associative_scan", "auto_functionalized", "auto_functionalized_v2", "cond", "flex_attention", "map_impl",
        "out_dtype", "scan", "strict_mode", "while_loop", "wrap_with_autocast", "wrap_with_set_grad_enabled",
    )
)  # fmt: skip

_CONTAINERS: Final = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})


def copy_checked(path: Path, copy: Path, *, device: str) -> None:
    """Check the program at `path` without running anything of it, and write what was checked to `copy`.

    `device` is the torch device that it is to be compiled for. The copy lacks what compiling does not need: extra files
    and the nodes' metadata (such as stack traces, with paths of another machine). Raises `SavedProgramError`.
    """
    _demand_program(path)
    try:
        package = read_package(path)
    except AotiError as error:
        raise SavedProgramError(str(error).rstrip("."), "get the file again, or " + SAVE_AGAIN) from error
    if package.models:
        raise SavedProgramError(
            f"has code that AOTInductor compiled already (model `{min(package.models)}`)",
            "save the program that was compiled, with `torch.export.save(program, path)`",
        )
    _demand_one(package.other)
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as checked:
            _copy_members(_Members(archive, package.stem, package.other), checked, device)
    except SavedProgramError:
        raise
    except RecursionError as error:
        raise SavedProgramError("is nested more deeply than any program", UNTRUSTED) from error
    except (
        zipfile.BadZipFile,
        ValueError,
        EOFError,
        NotImplementedError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise SavedProgramError(f"is damaged: {error}", "get the file again, or " + SAVE_AGAIN) from error


# --- What kind of file it is ---------------------------------------------------------------------------------------


def _demand_program(path: Path) -> None:
    """Refuse everything that is no PT2 archive, saying what it is."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise SavedProgramError(f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    if not head:
        raise SavedProgramError("is an empty file", "get the file again, or " + SAVE_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        raise SavedProgramError("is a pointer of Git LFS, not the file itself", "run `git lfs pull`")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] or name: name for name in archive.namelist()}
            pickled = archive.read(names["data.pkl"]) if "data.pkl" in names else b""
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        if head.startswith(b"PK"):
            raise SavedProgramError("is damaged or cut off", "get the file again, or " + SAVE_AGAIN) from error
        kind = "is a pickle" if head.startswith(b"\x80") else "is not a zip archive"
        raise SavedProgramError(f"{kind}, so it is no exported program") from error
    if "archive_format" in names:
        return
    if "serialized_exported_program.json" in names:
        raise SavedProgramError(
            "was saved by torch 2.7 or older, in a format that is no longer read", "load it there and export it anew"
        )
    if "constants.pkl" in names:
        raise SavedProgramError(
            "is a TorchScript file", "export the nn.Module it was made from, and save that with `torch.export.save`"
        )
    if pickled:
        library = all(name.startswith(("torch.", "collections.")) for name in imports(pickled))
        kind = "a state dict or other tensors" if library else "a pickled module or other objects"
        raise SavedProgramError(
            f"was written by `torch.save` and holds {kind}",
            'a state dict goes with its code: `model = "module:attribute"` and `weights`. For a program, call '
            "`torch.export.save(torch.export.export(model, example_inputs), path)`",
        )
    raise SavedProgramError("is a zip archive, but no exported program")


def _demand_one(names: Mapping[str, int]) -> None:
    programs = sorted(name for name in names if name.startswith("models/"))
    if programs != [_PROGRAM]:
        found = ", ".join(f"`{name.removeprefix('models/').removesuffix('.json')}`" for name in programs)
        raise SavedProgramError(
            f"has {len(programs)} programs ({found}), where one called `model` is expected"
            if programs
            else "has no program in it",
            "save each program in a file of its own, with `torch.export.save(program, path)`",
        )
    missing = [name for name in (*_PAYLOADS, _INPUTS) if name not in names]
    if missing:
        raise SavedProgramError(
            f"lacks `{missing[0]}`, which torch 2.8 and newer write", "load it where it was saved, and save it anew"
        )
    if not names[_INPUTS]:
        raise SavedProgramError(
            "has no example inputs",
            "set `program.example_inputs = (args, kwargs)` before saving; compiled code is checked on them",
        )


# --- The members ---------------------------------------------------------------------------------------------------


class _Members:
    """The members of an archive that `read_package` found sound, by their names inside its folder."""

    def __init__(self, archive: zipfile.ZipFile, stem: str, sizes: Mapping[str, int]) -> None:
        self.archive, self.stem, self.sizes = archive, stem, sizes

    def read(self, name: str) -> bytes:
        return self.archive.read(f"{self.stem}/{name}")

    def text(self, name: str, default: str) -> str:
        return self.read(name).decode() if name in self.sizes else default

    def copy(self, name: str, to: zipfile.ZipFile) -> None:
        """Copy one member in pieces: weights may be larger than memory."""
        with (
            self.archive.open(f"{self.stem}/{name}") as source,
            to.open(zipfile.ZipInfo(f"program/{name}"), "w", force_zip64=True) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)


def _copy_members(members: _Members, checked: zipfile.ZipFile, device: str) -> None:
    version = members.text(".data/version", "6").strip()
    if int(version) > _NEWEST_CONTAINER:
        raise SavedProgramError(f"is a container of version {version}, of a newer torch than this", _pin(""))
    order = members.text("byteorder", "little")
    if order != sys.byteorder:
        raise SavedProgramError(
            f"was saved on a {order}-endian machine, and this one is {sys.byteorder}-endian",
            "save it on a machine of this kind",
        )
    program = json.loads(members.read(_PROGRAM))
    _check_version(program)
    devices: set[str] = set()
    contents = {_PROGRAM: json.dumps(_Checked(devices).value(program), allow_nan=False).encode()}
    files: set[str] = set()
    for config, (folder, prefix) in _PAYLOADS.items():
        payloads = _Checked(devices).value(json.loads(members.read(config)))
        contents[config] = json.dumps(payloads, allow_nan=False).encode()
        for name, payload in payloads["config"].items():
            file = folder + payload["path_name"]
            if not payload["path_name"].startswith(prefix) or "/" in payload["path_name"]:
                raise custom_object(name)
            if payload["use_pickle"]:
                contents[file] = checked_pickle(members.read(file), file)
            else:
                files.add(file)
    _check_devices(devices, device)
    contents[_INPUTS] = checked_pickle(members.read(_INPUTS), _INPUTS)
    contents |= {"archive_format": b"pt2", "archive_version": b"0", ".data/version": f"{version}\n".encode()}
    contents["byteorder"] = order.encode()
    for name, content in contents.items():
        checked.writestr(f"program/{name}", content)
    for name in sorted(files - contents.keys()):
        members.copy(name, checked)


def _check_version(program: Mapping[str, Any]) -> None:
    """Refuse programs in the language of another torch."""
    import torch
    from torch._export.serde.schema import SCHEMA_VERSION

    found = (program["schema_version"]["major"], program["schema_version"]["minor"])
    saved_by = str(program.get("torch_version", "an unknown version"))
    opset, known = program.get("opset_version", {}).get("aten", 0), torch._C._get_max_operator_version()  # noqa: SLF001
    if found > SCHEMA_VERSION or opset > known:
        said = f"schema {found[0]}.{found[1]}" if found > SCHEMA_VERSION else f"operator set {opset}"
        own = f"{SCHEMA_VERSION[0]}.{SCHEMA_VERSION[1]}" if found > SCHEMA_VERSION else str(known)
        raise SavedProgramError(
            f"was saved by a newer torch ({saved_by}, {said}) than this build has ({torch.__version__}, {own})",
            _pin(saved_by),
        )
    if found[0] != SCHEMA_VERSION[0]:
        raise SavedProgramError(
            f"was saved by torch {saved_by}, in a language (schema {found[0]}.{found[1]}) that torch "
            f"{torch.__version__} no longer reads",
            "export the model anew",
        )


def _pin(version: str) -> str:
    number = re.fullmatch(r"\d+\.\d+\.\d+", version.partition("+")[0])
    requirement = f"`torch=={number[0]}`" if number else "that torch"
    return f"write {requirement} in `build-system.requires`, or save the program with the torch of this build"


def _check_devices(devices: set[str], device: str) -> None:
    foreign = sorted(devices - {"cpu", device})
    if foreign:
        raise SavedProgramError(
            f'is a program for "{foreign[0]}", and this build compiles it for `device = "{device}"`',
            f'write `device = "{foreign[0]}"`, or move it before it is saved: '
            f"`torch.export.passes.move_to_device_pass(program, {device!r})`",
        )
    if device not in devices and devices:
        raise SavedProgramError(
            f'is a program for "cpu", and this build compiles it for `device = "{device}"`',
            f'write `device = "cpu"`, or move it before it is saved: '
            f"`torch.export.passes.move_to_device_pass(program, {device!r})`",
        )


# --- Pickles -------------------------------------------------------------------------------------------------------


# --- The program ---------------------------------------------------------------------------------------------------


class _Checked:
    """Goes through a program's JSON; `value` returns what torch may see of it. Notes `devices` on the way."""

    def __init__(self, devices: set[str]) -> None:
        self.devices = devices

    def value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._table(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, str):
            _demand_plain(value)
        return value

    def _table(self, table: dict[str, Any]) -> dict[str, Any]:
        if table.get("name") == "assert_msg" and isinstance(table.get("arg"), dict) and "as_string" in table["arg"]:
            # Prose for people, about an expression. It ends up in C++ text.
            message = re.sub(r"[^\w .,:+\-<>=/]", "_", str(table["arg"]["as_string"]))
            table = {**table, "arg": {"as_string": message}}
        return {key: self._item(key, value) for key, value in table.items()}

    def _item(self, key: str, value: Any) -> Any:
        _demand_plain(key)
        # The keys of some tables are names of nodes, so the type of the value has to fit as well.
        match key, value:
            case "metadata", dict() if all(isinstance(item, str) for item in value.values()):
                return {}
            case (("target" | "as_operator"), str()):
                _check_operator(value)
                return value
            case "expr_str", str():
                check_size(value)
                return value
            case "range_constraints", dict():
                # Also has the ranges of expressions (`2*s77`), which follow from those of their symbols. torch 2.13
                # takes them for symbols when it reads them back, and cannot decompose the program after that.
                return {name: self.value(bounds) for name, bounds in value.items() if name.isidentifier()}
            case "guards_code", list():
                for guard in value:
                    check_guard(guard)
                return value
            case (("in_spec" | "out_spec"), str()):
                _check_containers(value, is_input=key == "in_spec")
                return value
            case "forward_arg_names", list():
                _demand_identifiers(value)
                return value
            case (("as_custom_obj" | "custom_obj_name"), _):
                raise custom_object(str(value))
            case (("device" | "as_device"), {"type": str(kind)}):
                self.devices.add(kind)
        return self.value(value)


def _demand_plain(text: str) -> None:
    if not _PLAIN.fullmatch(text):
        raise SavedProgramError(
            f"has the name or text {text[:80]!r}, with characters that would get into generated code",
            "rename it to letters, digits and _, and save the program again; if you do not know where it comes from, "
            + UNTRUSTED,
        )


def _demand_identifiers(names: Any) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise SavedProgramError(f"has a parameter called {name!r}, which is no Python identifier", UNTRUSTED)


def _check_operator(target: str) -> None:
    known = target in _HIGHER_ORDER or target in _PYTHON_OPERATORS or _OPERATORS.fullmatch(target)
    if not known or target.startswith(_FILE_OPERATORS):
        raise SavedProgramError(
            f"calls `{target[:80]}`, which is none of the operators that a saved program may use",
            "a custom operator needs the library that defines it: compile the model from its code, with `model`. If "
            f"the program should have none, {UNTRUSTED}",
        )


def _check_containers(text: str, *, is_input: bool) -> None:
    _, spec = json.loads(text)
    if is_input and spec["type"] == "builtins.tuple" and len(spec["children_spec"]) == 2:
        _demand_identifiers(json.loads(spec["children_spec"][1]["context"]) or ())
    for node in nodes(spec):
        if node["type"] not in _CONTAINERS:
            raise SavedProgramError(
                f"takes or gives a `{str(node['type'])[:80]}`, a container that needs code to be restored",
                "export a model that takes and gives tuples, lists and dicts, or compile it from its code, with "
                "`model`, where named tuples and dataclasses work",
            )
        context = None if node["context"] is None else json.loads(node["context"])
        for key in context if isinstance(context, list) else [context]:
            if isinstance(key, str):
                _demand_plain(key)
            elif key is not None and not isinstance(key, int | float):
                raise SavedProgramError("has a container with keys other than strings and numbers", UNTRUSTED)
