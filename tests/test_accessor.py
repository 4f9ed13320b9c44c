"""The generated `_models.py`: its text, how it loads models, and what it says when it cannot."""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib.util
import inspect
import json
import os
import pickle
import platform
import subprocess
import sys
import threading
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import caller_states
import pytest
import torch
from conftest import run, write_files
from filelock import FileLock
from support_models import Answer, Everything, Pair, Square, compile_model, write_accessor

from hatch_aoti.artifact.archive import read_package, write_package
from hatch_aoti.artifact.constants_file import write_constants
from hatch_aoti.runtime.contract import (
    Constant,
    Dim,
    Group,
    Omitted,
    Parameter,
    Signature,
    Size,
    TensorInput,
    TensorOutput,
)
from hatch_aoti.runtime.declarations import Variant
from hatch_aoti.settings.reader import RESERVED_NAMES
from hatch_aoti.wheel.accessor import AccessorModel, render, runtime_files

BUILD: dict[str, Any] = {
    "torch_version": "2.13.0+cpu",
    "system": "Linux",
    "machine": "x86_64",
    "hatch_aoti_version": "1.2",
}

X = TensorInput("x", "float32", (Size(((1, "n"),)), Size(plus=4)))
DOUBLE = Signature(
    (Parameter("x", "positional or keyword", X), Parameter("flag", "positional or keyword", Constant(True, "flag"), Constant(True, "flag"))),
    TensorOutput(0, "float32", ("n", 4)),
    (Dim("n", 1, 16),),
)  # fmt: skip


V3 = (Variant("x86-64-v3", "double.pt2", ("avx2",), "AVX2"),)


def declare(name="double", signature=DOUBLE, variants=V3, **options):
    return AccessorModel(name, signature, variants, "nowhere:Double", **options)


def install(directory: Path, *models: AccessorModel, package="wheel", **build):
    """Write a package with an accessor, and import the accessor."""
    root = directory / package
    root.mkdir(parents=True, exist_ok=True)
    write_accessor(root, render(models, package=package, **{**BUILD, **build}))
    return load_module(root / "_models.py")


def load_module(path: Path):
    """Import a `_models.py` by its path, as the module of a package of its folder's name."""
    package = path.parent.name
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        package, path.parent / "__init__.py", submodule_search_locations=[os.fspath(path.parent)]
    )
    assert spec
    assert spec.loader
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module(f"{package}._models")


class FakeLoader:
    """Stands in for PyTorch's C++ loader: notes what it was given, and doubles its inputs."""

    made: list[FakeLoader]

    def __init__(self, path, name, single_threaded, num_runners, device_index):
        assert name == "model"
        self.folder, self.num_runners = Path(path), num_runners
        self.options = (single_threaded, num_runners, device_index)
        assert any(self.folder.rglob("model.wrapper.so"))
        self.made.append(self)

    def load_constants(self, *_):
        pytest.fail("this model has no constants of its own")

    def boxed_run(self, flat):
        results = [x * 2 for x in flat]
        flat.clear()
        return results


class Package:
    """Stands in for what `aoti_load_package` returns."""

    def __init__(self):
        self.loader = types.SimpleNamespace(boxed_run=lambda flat: [flat[0] * 3], load_constants=None)


@pytest.fixture
def fake(monkeypatch):
    """Replace the C++ loader; return the list of those made."""
    monkeypatch.setattr(FakeLoader, "made", [], raising=False)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", FakeLoader)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "cpu_name": "Test CPU"})
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return FakeLoader.made


def archive(path: Path) -> Path:
    """Write an archive of the kind that the C++ loader takes, without anything that could be loaded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{path.stem}/data/aotinductor/model/model.wrapper.so", b"\x7fELF" + bytes(5000))
        file.writestr(f"{path.stem}/archive_format", b"pt2")
    return path


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A TMPDIR of its own, to see what is left there."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


# --- The text ---


def test_the_text_depends_on_nothing_but_the_arguments():
    text = render([declare()], package="wheel", **BUILD)
    assert text == render([declare()], package="wheel", **BUILD)
    assert "hatch_aoti." not in text.replace("hatch_aoti.contract", "")
    assert str(Path.cwd()) not in text


def test_the_docstring_says_what_there_is_and_how_to_call_it():
    doc = ast.get_docstring(ast.parse(render([declare()], package="wheel", **BUILD))) or ""
    assert "double(x: float32[n, 4], flag=True) -> float32[n, 4]\n      where n = 1…16" in doc
    assert "from wheel._models import double" in doc


def test_a_model_has_forwards_own_parameters(tmp_path):
    scalars = Parameter("mode", "keyword", Constant("b", "mode"), Constant("a", "mode"))
    pair = Parameter("pair", "positional or keyword", Group("tuple", (X, Constant(None, "pair[1]")), (), "", "pair"))
    odd = Parameter("odd", "keyword", Omitted("odd"), Omitted("odd"))
    batch = Parameter("batch", "**kwargs", Group("**kwargs", (X,), ("a",), "", "batch"))
    output = Group("dict", (TensorOutput(0, "float32", ()), Constant(1)), ("y", "z"))
    first = Parameter("first", "positional", X)
    signature = Signature((first, pair, scalars, odd, batch), output, (Dim("n", 1, 16),))
    net = install(tmp_path, declare("net", signature)).net
    assert str(inspect.signature(net)) == (
        "(first: 'torch.Tensor', /, pair: 'tuple[torch.Tensor, None]', *, mode: 'str' = 'a', odd: '_aoti.Default' = …, "
        "**batch: 'torch.Tensor') -> 'dict[str, torch.Tensor | int]'"
    )


@pytest.mark.slow
def test_a_typed_package_and_its_users_pass_strict_type_checks(tmp_path):
    install(tmp_path, declare(), package="typed")
    write_files(
        tmp_path,
        {
            "typed/py.typed": "",
            "good.py": """
                import torch
                from typed._models import MODELS, LoadError, Model, double, load

                def use(model: Model, x: torch.Tensor) -> torch.Tensor:
                    return double.with_options(num_runners=2)(x, flag=True) + double.load()(x)

                names: list[str] = [model.name for model in MODELS.values()]
                file: str = str(double.path)
                inputs: list[str] = [leaf.dtype for leaf in double.signature.inputs]
                package = load("double")
                error: type[RuntimeError] = LoadError
            """,
            "bad.py": "from typed._models import double\n\ndouble(1)\ndouble.weight\n",
        },
    )
    check = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    good = run(*check, "good.py", "typed/_models.py", cwd=tmp_path)
    assert good.returncode == 0, good.output
    bad = run(*check, "bad.py", cwd=tmp_path)
    assert 'bad.py:3: error: Argument 1 to "__call__" of "_double_model" has incompatible type "int"' in bad.output
    assert '"_double_model" has no attribute "weight"' in bad.output


def test_names_that_the_accessor_needs_cannot_be_names_of_models():
    signature = Signature((Parameter("x", "positional", Group("list", ())),), Omitted("y"))
    text = render([declare("net", signature)], package="wheel", debug=("A=1",), **BUILD)
    tree = ast.parse(text)
    bound = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in node.names
    ]
    inside = {
        item.id
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for item in ast.walk(node)
        if isinstance(item, ast.Name)
    }
    needed = {name for name in [*bound, *inside] if not name.startswith("_")} - {"net", "self", "x"}
    needed -= {
        n.id  # type: ignore[attr-defined]
        for c in tree.body
        if isinstance(c, ast.ClassDef)
        for s in c.body
        if isinstance(s, ast.Assign)
        for n in s.targets
    }
    assert needed <= RESERVED_NAMES, f"add to settings: {sorted(needed - RESERVED_NAMES)}"
    assert {"Any", "load", "torch"} <= needed


def test_importing_and_listing_leave_torch_alone(tmp_path):
    install(tmp_path, declare())
    archive(tmp_path / "wheel" / "double.pt2")
    code = "import sys, wheel._models as m; m.double.signature; m.double.path; assert 'torch' not in sys.modules"
    assert run_python(tmp_path, "-c", code).returncode == 0
    blocked = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('wheel._models', run_name='__main__')"
    listed = run_python(tmp_path, "-c", blocked)
    assert "double(x: float32[n, 4], flag=True) -> float32[n, 4]" in listed.stdout
    assert "double.pt2: 0.01 MB, x86-64-v3 (AVX2), cpu" in listed.stdout
    assert listed.stderr == ""


def run_python(path, *arguments):
    paths = os.pathsep.join([str(path), str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    environ = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environ, cwd=path, capture_output=True, text=True, check=False)


# --- Loading ---


def test_the_first_call_loads_and_leaves_nothing_behind(tmp_path, fake, temporary):
    # pytorch/pytorch#141772: PyTorch's loader keeps archives unpacked in TMPDIR, and forgets them when killed
    module = install(tmp_path, declare(num_runners=3))
    archive(module.double.path)
    x = torch.ones(2, 4)
    assert torch.equal(module.double(x), x * 2)
    assert torch.equal(module.double(x=x, flag=True), x * 2)
    assert [loader.num_runners for loader in fake] == [3]
    assert fake[0].folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_a_model_can_be_loaded_before_its_first_call(tmp_path, fake, temporary):
    module = install(tmp_path, declare())
    archive(module.double.path)
    assert module.double.load() is module.double
    assert len(fake) == 1
    x = torch.ones(2, 4)
    assert torch.equal(module.double.load()(x), x * 2)
    assert len(fake) == 1


def test_threads_that_call_at_once_load_once(tmp_path, fake, temporary):
    module = install(tmp_path, declare())
    archive(module.double.path)
    barrier, wrong = threading.Barrier(8), []

    def work(number):
        barrier.wait()
        for step in range(50):
            x = torch.full((2, 4), float(number * 100 + step))
            if not torch.equal(module.double(x), x * 2):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(fake) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_loads_can_load_itself(tmp_path, fake, temporary):
    module = install(tmp_path, declare())
    archive(module.double.path)
    held, done = threading.Event(), threading.Event()

    def hold():
        with module.double._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of just this situation
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if torch.equal(module.double(torch.ones(1, 4)), torch.full((1, 4), 2.0)) else 2
        finally:
            os._exit(status)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_models_are_pickled_by_name(tmp_path, monkeypatch):
    module = install(tmp_path, declare(), package="pickled")
    monkeypatch.syspath_prepend(tmp_path)
    assert pickle.loads(pickle.dumps(module.double)) is module.double


def test_a_folder_that_cannot_be_used_is_passed_over(tmp_path, fake, monkeypatch):
    module = install(tmp_path, declare())
    archive(module.double.path)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    module.double(torch.ones(1, 4))
    assert fake[0].folder.parent == cache


def test_a_temporary_folder_mounted_noexec_is_passed_over(tmp_path, fake, temporary, monkeypatch):
    class Noexec(FakeLoader):
        def __init__(self, path, *rest):
            if Path(path).parent == temporary:
                raise RuntimeError(f"Error in dlopen: {path}: failed to map segment from shared object")
            super().__init__(path, *rest)

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Noexec)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "missing"))
    module = install(tmp_path, declare())
    archive(module.double.path)
    module.double(torch.ones(1, 4))
    assert fake[0].folder.parent == module.double.path.parent
    assert list(temporary.iterdir()) == []


def test_no_usable_folder_at_all_is_an_error_that_lists_them(tmp_path, fake, temporary, monkeypatch):
    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    module = install(tmp_path, declare())
    archive(module.double.path)
    with pytest.raises(module.LoadError, match="Set TMPDIR") as info:
        module.double(torch.ones(1, 4))
    assert f"{temporary}: No space left on device" in str(info.value)
    assert list(temporary.iterdir()) == []


def test_the_best_variant_that_this_cpu_can_run_is_picked(tmp_path, fake, temporary, monkeypatch):
    variants = (
        Variant("x86-64-v4", "double.v4.pt2", ("avx512_f",), "AVX-512"),
        Variant("x86-64-v3", "double.v3.pt2", ("avx2",), "AVX2"),
    )
    module = install(tmp_path, declare(variants=variants))
    assert module.double.path.name == "double.v3.pt2"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": True})
    assert module.double.path.name == "double.v4.pt2"


# --- What is said when loading is impossible ---


def test_a_cpu_below_the_baseline_is_refused_before_any_code_is_loaded(tmp_path, fake, temporary, monkeypatch):
    # pytorch/pytorch#121516: SIGILL otherwise
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False, "cpu_name": "Old CPU"})
    module = install(tmp_path, declare())
    archive(module.double.path)
    with pytest.raises(module.LoadError, match=r"double needs x86-64-v3 \(AVX2\); this CPU \(Old CPU\) lacks avx2"):
        module.double(torch.ones(1, 4))
    assert fake == []


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "x86_64"), ("Linux", "aarch64")])
def test_another_platform_is_named(tmp_path, fake, monkeypatch, system, machine):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    module = install(tmp_path, declare())
    with pytest.raises(module.LoadError, match=f"compiled for Linux on x86_64; this is {system} on {machine}"):
        module.double(torch.ones(1, 4))


def test_an_older_torch_is_named(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    module = install(tmp_path, declare())
    with pytest.raises(module.LoadError, match=r'2\.13\.0\+cpu .* this is torch 2\.9\.1.*pip install "torch>=2\.13"'):
        module.load("double")


def test_a_missing_torch_is_named(tmp_path, fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    module = install(tmp_path, declare())
    with pytest.raises(module.LoadError, match=r"double needs torch 2\.13 or newer, which cannot be imported here"):
        module.double(None)


def test_a_missing_file_is_named(tmp_path, fake):
    module = install(tmp_path, declare())
    for call in (lambda: module.double(torch.ones(1, 4)), lambda: module.load("double")):
        with pytest.raises(module.LoadError, match=r"double\.pt2 is missing"):
            call()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_found_out_before_any_of_its_code_is_loaded(tmp_path, fake, temporary, damage):
    module = install(tmp_path, declare())
    content = bytearray(archive(module.double.path).read_bytes())
    content[1000] ^= 0xFF
    module.double.path.write_bytes(content[:3000] if damage == "cut" else content)
    with pytest.raises(module.LoadError, match=r"double\.pt2 is damaged"):
        module.double(torch.ones(1, 4))
    assert fake == []
    assert list(temporary.iterdir()) == []


def test_what_pytorch_says_when_it_cannot_load_is_passed_on_with_both_versions(tmp_path, fake, temporary, monkeypatch):
    class Failing(FakeLoader):
        def __init__(self, *_):
            raise RuntimeError("undefined symbol: aoti_torch_new\nbacktrace")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Failing)
    module = install(tmp_path, declare())
    archive(module.double.path)
    with pytest.raises(
        module.LoadError,
        match=rf"torch {torch.__version__} cannot load .*: undefined symbol: aoti_torch_new$".replace("+", r"\+"),
    ):
        module.double(torch.ones(1, 4))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [None, "2" * 40])
def test_the_file_of_another_build_is_refused_before_any_of_its_code_is_loaded(tmp_path, fake, temporary, number):
    module = install(tmp_path, declare(variants=(Variant("x86-64-v3", "double.pt2", id="1" * 40),)))
    archive(module.double.path)
    with zipfile.ZipFile(module.double.path, "a") as file:
        if number:
            file.writestr("double/.data/serialization_id", number)
    for load in (lambda: module.double(torch.ones(1, 4)), lambda: module.load("double")):
        with pytest.raises(module.LoadError, match=r"double\.pt2 is not the file that this _models\.py was built with"):
            load()
    assert fake == []
    assert list(temporary.iterdir()) == []


def test_the_file_of_this_build_is_loaded(tmp_path, fake, temporary):
    module = install(tmp_path, declare(variants=(Variant("x86-64-v3", "double.pt2", id="1" * 40),)))
    archive(module.double.path)
    with zipfile.ZipFile(module.double.path, "a") as file:
        file.writestr("double/.data/serialization_id", "1" * 40)
    assert module.double(torch.ones(1, 4)).sum() == 8


def test_models_imported_from_a_zip_file_say_that_it_must_be_unpacked(tmp_path, fake):
    module = install(tmp_path, declare(), package="zipped")
    archive(module.double.path)
    packed = tmp_path / "application.pyz"
    with zipfile.ZipFile(packed, "w") as file:
        for name in ("__init__.py", "_models.py", "double.pt2", *runtime_files()):
            file.write(tmp_path / "zipped" / name, f"zipped/{name}")
    code = f"""if True:
        import sys; sys.path.insert(0, {str(packed)!r})
        import torch, zipped._models as m
        try:
            m.double(torch.ones(1, 4))
        except m.LoadError as error:
            print(error)
    """
    done = run_python(packed.parent / "..", "-c", code)
    assert done.returncode == 0, done.stderr
    assert f"double.pt2 is in the zip file {packed}" in done.stdout


def test_pytorchs_object_in_a_noexec_folder_says_what_to_do(tmp_path, fake, temporary, monkeypatch):
    import torch._inductor

    def fail(*_, **__):
        raise RuntimeError("Error in dlopen: /x.so: failed to map segment from shared object")

    monkeypatch.setattr(torch._inductor, "aoti_load_package", fail)
    module = install(tmp_path, declare())
    archive(module.double.path)
    with pytest.raises(module.LoadError, match=rf"{temporary} does not allow to run code \(noexec\): set TMPDIR"):
        module.load("double")


# --- What killed processes leave ---


def stale(place: Path, name: str) -> Path:
    folder = place / name
    folder.mkdir(mode=0o700)
    (folder / "model.so").touch()
    os.utime(folder, (1, 1))
    return folder


def test_folders_that_killed_processes_left_go_and_all_others_stay(tmp_path, fake, temporary):
    import fcntl

    gone = stale(temporary, "hatch-aoti-abcd1234")
    fresh = stale(temporary, "hatch-aoti-fresh123")
    os.utime(fresh)
    locked = stale(temporary, "hatch-aoti-locked12")
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    public = stale(temporary, "hatch-aoti-public12")
    public.chmod(0o755)
    others = [stale(temporary, name) for name in ("hatch-aoti-mine", "aoti-abcd1234", "hatch-aoti-abcd1234.old")]
    outside = stale(tmp_path, "outside")
    (temporary / "hatch-aoti-linked12").symlink_to(outside)
    (temporary / "hatch-aoti-afile123").touch()
    module = install(tmp_path, declare())
    archive(module.double.path)
    module.double(torch.ones(1, 4))
    os.close(lock)
    assert not gone.exists()
    for kept in (fresh, locked, public, *others, outside):
        assert (kept / "model.so").exists(), kept
    assert (temporary / "hatch-aoti-linked12").is_symlink()
    assert (temporary / "hatch-aoti-afile123").exists()


def test_the_folder_of_a_process_that_is_killed_while_it_loads_goes_with_the_next_load(tmp_path, fake, temporary):
    module = install(tmp_path, declare())
    archive(module.double.path)
    child = os.fork()
    if child == 0:
        try:
            module._aoti.unpacking._Folder(temporary)
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    [left] = temporary.iterdir()
    os.utime(left, (1, 1))
    module.double(torch.ones(1, 4))
    assert list(temporary.iterdir()) == []


# --- Locks ---


def test_a_model_that_is_being_loaded_stops_no_other(tmp_path, fake, temporary):
    module = install(tmp_path, declare(), declare("triple", variants=(Variant("x86-64-v3", "double.pt2"),)))
    archive(module.double.path)
    answers = []
    with module.double._lock, module._aoti.packages._packages_lock:
        thread = threading.Thread(target=lambda: answers.append(module.triple(torch.ones(1, 4)).sum().item()))
        thread.start()
        thread.join(60)
        assert answers == [8]


# --- PyTorch's own object ---


def test_load_gives_pytorchs_object_once_for_each_set_of_arguments(tmp_path, fake, temporary, monkeypatch):
    import torch._inductor

    calls = []

    def load_package(*arguments, **options):
        calls.append((arguments, options))
        return Package()

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load_package)
    module = install(tmp_path, declare())
    archive(module.double.path)
    assert module.load("double") is module.load("double", -1, False)
    assert module.load("double") is not module.load("double", run_single_threaded=True)
    assert calls[0] == ((str(module.double.path),), {"run_single_threaded": False, "device_index": -1})
    assert len(calls) == 2
    with pytest.raises(KeyError, match="no model 'dubble' in this package; there are: double"):
        module.load("dubble")


def test_what_a_failed_load_leaves_in_tmpdir_is_removed(tmp_path, fake, temporary, monkeypatch):
    # pytorch/pytorch#141772
    import torch._inductor

    other = temporary / "aotinductor_other" / "another_model"
    mine = temporary / "aotinductor_mine" / "double"

    def fail(*_, **__):
        other.mkdir(parents=True)
        mine.mkdir(parents=True)
        raise RuntimeError("broken")

    monkeypatch.setattr(torch._inductor, "aoti_load_package", fail)
    module = install(tmp_path, declare())
    archive(module.double.path)
    with pytest.raises(module.LoadError, match=r"PyTorch cannot load .*: broken"):
        module.load("double")
    assert [path.name for path in temporary.iterdir()] == ["aotinductor_other"]


def test_a_torch_without_the_loader_class_is_served_by_its_own_function(tmp_path, fake, temporary, monkeypatch):
    import torch._inductor

    monkeypatch.delattr(torch._C._aoti, "AOTIModelPackageLoader")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: Package())
    module = install(tmp_path, declare())
    archive(module.double.path)
    assert module.double(torch.ones(1, 4)).sum() == 12


def test_a_torch_without_the_loader_class_is_given_the_constants_as_well(tmp_path, fake, temporary, monkeypatch):
    import torch._inductor

    package, given = Package(), []
    package.loader.load_constants = lambda tensors, *_: given.append(list(tensors))
    monkeypatch.delattr(torch._C._aoti, "AOTIModelPackageLoader")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: package)
    module = install(tmp_path, declare(constants="_models.safetensors"))
    write_constants(module.Model.folder / "_models.safetensors", "double", {"weight": torch.ones(3)})
    archive(module.double.path)
    module.double(torch.ones(1, 4))
    assert given == [["weight"]]


def test_pytorch_gets_one_model_of_a_bundle_under_the_name_that_it_looks_for(tmp_path, fake, temporary, monkeypatch):
    import torch._inductor

    found = []

    def load_package(path, **_):
        package = read_package(Path(path))
        found.append({model: package.read(model, "model.wrapper.so")[:6] for model in package.models})
        return Package()

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load_package)
    variants = {name: (Variant("x86-64-v3", "nets.pt2", entry=name),) for name in ("double", "model")}
    module = install(tmp_path, *(declare(name, variants=variant) for name, variant in variants.items()))
    files = {name: {"model.wrapper.so": f"\x7fELF {name}".encode()} for name in variants}
    write_package(module.double.path, files)
    for name in variants:
        module.load(name)
    assert found == [{"model": b"\x7fELF d"}, {"model": b"\x7fELF m"}]
    assert list(temporary.iterdir()) == []


def test_a_damaged_bundle_is_an_error_that_names_it(tmp_path, fake, temporary):
    module = install(tmp_path, declare(variants=(Variant("x86-64-v3", "nets.pt2", entry="double"),)))
    module.double.path.write_bytes(b"PK")
    with pytest.raises(module.LoadError, match=r"double: PyTorch cannot load .*nets\.pt2: File is not a zip file"):
        module.load("double")
    with pytest.raises(module.LoadError, match=r"double: .*nets\.pt2 is damaged \(File is not a zip file\)"):
        module.double(torch.ones(1, 4))


# --- A real compiled model ---


@pytest.fixture(scope="session")
def compiled(shared):
    """A package with one model, compiled once in a test run."""
    directory = shared / "accessor" / "real"
    with FileLock(shared / "accessor.lock"):
        if not (directory / "_aoti" / "unpacking.py").exists():
            directory.mkdir(parents=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
                model = compile_model(
                    "net", Everything(), *Everything.example(), Everything.dynamic_shapes(), directory
                )
            build = {"torch_version": torch.__version__, "system": platform.system(), "machine": platform.machine()}
            install(directory.parent, model, package="real", **build)
    return directory


@pytest.fixture
def real(compiled):
    """The accessor of the compiled model, freshly imported, so with nothing loaded."""
    return load_module(compiled / "_models.py")


def test_a_compiled_model_answers_as_eager_does(real):
    # pytorch/pytorch#165444, #169118, #120424 (small buffers that forward changes), #140615, #197104, #153992
    eager = Everything().eval()
    for size in (5, 1, 64):
        (batch, x), kwargs = Everything.example(size)
        wide = torch.stack([x, x], -1)[..., 0]
        assert not wide.is_contiguous()
        with torch.no_grad():
            want = eager(batch, x, **kwargs)
        got = real.net(dict(reversed(batch.items())), wide, **kwargs)
        torch.testing.assert_close(wide, x)
        assert list(got) == list(want)
        assert type(got["pair"]) is Pair
        assert got["pair"].second is kwargs["p"]
        torch.testing.assert_close(got["pair"].first, want["pair"].first)
        assert type(got["answer"]) is Answer
        torch.testing.assert_close(got["answer"].scores, want["answer"].scores)
        assert got["answer"].note == "fixed"
        assert type(got["max"]) is torch.return_types.max
        torch.testing.assert_close(tuple(got["max"]), tuple(want["max"]))
        assert got["rest"][0] is wide
        assert got["rest"][3:5] == [None, 7]
        for place in (1, 2, 5):
            torch.testing.assert_close(got["rest"][place], want["rest"][place].detach())


def test_a_compiled_model_refuses_what_it_would_misread(real):
    # pytorch/pytorch#141115, #130152
    (batch, x), kwargs = Everything.example()
    for wrong in (torch.randn(65, 3), torch.randn(5, 4), x.double(), x.numpy(), x.flatten(), None):
        with pytest.raises((TypeError, ValueError), match="net: x "):
            real.net(batch, wrong, **kwargs)
    with pytest.raises(ValueError, match="net: flag must be True"):
        real.net(batch, x, False, **kwargs)
    with pytest.raises(ValueError, match="net: batch lacks 'b'"):
        real.net({"a": batch["a"]}, x, **kwargs)
    with pytest.raises(TypeError, match=r"net\(\) missing 1 required keyword-only argument: 'p'"):
        real.net(batch, x)


def test_two_loaded_copies_have_separate_state(compiled):
    args, kwargs = Everything.example()
    counts = []
    for _ in range(2):
        module = load_module(compiled / "_models.py")
        counts += [module.net(*args, **kwargs)["rest"][5].item() for _ in range(2)]
    assert counts == [1, 2, 1, 2]


def test_results_outlive_the_model(compiled):
    args, kwargs = Everything.example()
    module = load_module(compiled / "_models.py")
    weight = module.net(*args, **kwargs)["rest"][1]
    del module
    sys.modules.pop("real._models")
    gc.collect()
    assert weight.tolist() == [0, 1, 2]


def test_many_loads_leave_no_files_behind(compiled, temporary):
    # pytorch/pytorch#141772
    args, kwargs = Everything.example()
    for _ in range(20):
        load_module(compiled / "_models.py").net(*args, **kwargs)
    assert list(temporary.iterdir()) == []


def test_loading_and_calling_are_quiet(compiled):
    code = (
        "import torch, real._models as m; from support_models import Everything as E; a, k = E.example(); "
        "print(sorted(m.net(*a, **k))); print(m.net)"
    )
    done = run_python(compiled.parent, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("['answer', 'max', 'pair', 'rest']\n<net(batch: {'a': float32[3]")


def test_pytorchs_object_for_the_same_file_answers_with_plain_containers(real, caplog):
    # pytorch/pytorch#191713: false alarms on loading
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = real.load("net")
        (batch, x), kwargs = Everything.example()
        got = package(batch, x, **kwargs)
    assert type(got["pair"]) is tuple
    assert got["rest"][3] is None
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.fixture(scope="session")
def states(shared):
    """What came of a call in each state of `caller_states.py`."""
    directory = shared / "accessor" / "states"
    with FileLock(shared / "states.lock"):
        if not (directory / "_aoti" / "unpacking.py").exists():
            directory.mkdir(parents=True, exist_ok=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
                model = compile_model("square", Square(), (Square.example(),), None, None, directory)
            model = dataclasses.replace(model, operators=("hatch_aoti_tests::square",))
            build = {"torch_version": torch.__version__, "system": platform.system(), "machine": platform.machine()}
            install(directory.parent, model, package="states", **build)
        if not (directory / "outcomes.json").exists():
            done = run_python(directory.parent, "-W", "ignore", str(Path(caller_states.__file__)), "states._models")
            assert done.returncode == 0, done.stderr
            (directory / "outcomes.json").write_text(done.stdout.splitlines()[-1])
    return json.loads((directory / "outcomes.json").read_text())


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("state", caller_states.ANSWERED)
def test_a_call_from_any_state_of_the_thread_is_answered_as_compiled(states, state, when):
    assert states[f"{state}, {when}"] == "right"


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("state", caller_states.REFUSED)
def test_a_state_that_compiled_code_cannot_take_part_in_is_refused_by_name(states, state, when):
    outcome = states[f"{state}, {when}"]
    assert outcome.startswith(("TypeError: square", "ValueError: square"))
    assert caller_states.REFUSED[state][1] in outcome
