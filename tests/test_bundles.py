"""Bundles: several models in one `.pt2`, under their own names, each loaded without the others.

`guide_project.py` has the project: a bundle, a saved program and plain models in one wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import edit, names_in, run, run_python
from guide_project import BUNDLED

from hatch_aoti.artifact.archive import read_package, write_package
from hatch_aoti.artifact.cache import Cache
from hatch_aoti.build.report import note_equal_weights
from hatch_aoti.compiler.target import Target
from hatch_aoti.compiler.toolchain import ToolchainRecord
from hatch_aoti.errors import AotiError
from hatch_aoti.job.values import Artifact, ArtifactRecord, Measured, ModelResult, NotVerified
from hatch_aoti.runtime.contract import Constant, Signature
from hatch_aoti.settings.model import ModelSettings
from hatch_aoti.wheel.model_files import locate_models

if TYPE_CHECKING:
    from conftest import Builder


# --- One wheel with everything that PyTorch's guide shows -----------------------------------------------------------


def test_a_saved_program_a_bundle_and_plain_models_in_one_wheel_answer_like_eager(guide: Path, installed_guide: Path):
    program = f"""
        import torch
        from safetensors.torch import load_file
        from guide import _models, digits, ranker, rows, scale

        def seeded(make):
            torch.manual_seed(0)
            return make()

        trained = digits.DigitsNet()
        trained.load_state_dict(load_file({str(guide / "weights/digits.safetensors")!r}))
        saved = torch.export.load({str(guide / "programs/columns.pt2")!r}).module()
        eager = {{
            "digits": (trained, (1, 8, 8)), "rows": (seeded(rows.Rows), (1, 8, 8)),
            "columns": (saved, (1, 8, 8)), "ranker": (seeded(ranker.build), (10,)), "scale": (scale.Scale(), (4,)),
        }}
        assert set(eager) == set(_models.MODELS)
        for name, (module, shape) in eager.items():
            for size in (1, 7, 16):
                x = torch.randn(size, *shape)
                with torch.no_grad():
                    want = module(x)
                torch.testing.assert_close(_models.MODELS[name](x), want, rtol=1e-4, atol=1e-5)
        print("alike")
    """
    assert run_python(program, installed_guide).check().output.splitlines()[-1] == "alike"


def test_a_bundle_is_one_file_and_weights_that_its_models_share_are_stored_once(guide_wheel: Path):
    names = [name for name in names_in(guide_wheel) if name.endswith((".pt2", ".safetensors"))]
    files = ["_models.safetensors", "ranker.pt2", "scale.pt2", "vision.pt2"]
    assert names == [f"guide/{name}" for name in files]
    with zipfile.ZipFile(guide_wheel) as archive:
        constants, vision = (archive.read(f"guide/{name}") for name in ("_models.safetensors", "vision.pt2"))
        manifest = json.loads(archive.read("guide/_models.json"))
    header = json.loads(constants[8 : 8 + int.from_bytes(constants[:8], "little")])
    indexes = {name: json.loads(index)["weight"]["tensor"] for name, index in header.pop("__metadata__").items()}
    assert indexes.keys() == {"columns", "rows"}
    assert {*indexes.values()} == set(header)  # both have the only tensor there is
    for name, model in manifest["models"].items():
        [artifact] = model["artifacts"]
        if name in BUNDLED:
            assert (model["bundle"], artifact["file"], artifact["entry"]) == ("vision", "vision.pt2", name)
            assert artifact["sha256"] == hashlib.sha256(vision).hexdigest()
            assert artifact["bytes"] == len(vision)
        else:
            assert (model["bundle"], artifact["file"], artifact["entry"]) == (None, f"{name}.pt2", "model")


def test_pytorchs_own_functions_find_each_model_by_its_name(installed_guide: Path):
    program = f"""
        import torch
        from torch._inductor.package import load_package
        from guide._models import MODELS
        for name in ("digits", "rows"):
            x = torch.randn(5, 1, 8, 8)
            stock = load_package({str(installed_guide / "guide/vision.pt2")!r}, name)
            if name == "rows":  # its constants are in the other file, which PyTorch does not know of
                torch.manual_seed(0)
                stock.load_constants({{"weight": torch.randn(64, 3)}}, check_full_update=True)
            assert torch.equal(stock(x), MODELS[name](x)), name
        print("alike")
    """
    without_compiler = {"PATH": ""}  # PyTorch would run it, for seconds
    ran = run_python(program, installed_guide, environ=without_compiler).check()
    assert ran.output.splitlines()[-1] == "alike"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
@pytest.mark.parametrize("use", ["MODELS[name]", "load(name)"])
def test_loading_a_model_loads_no_other_of_its_bundle_and_leaves_nothing_behind(
    use: str, installed_guide: Path, tmp_path: Path
):
    # torch's load_package constructs every model in the archive before it returns the one that it was asked for
    program = f"""
        import re, torch
        from pathlib import Path
        from guide._models import MODELS, load

        def mapped():
            maps = Path("/proc/self/maps").read_text(encoding="utf-8")
            return set(re.findall(r"\\S+/data/aotinductor/\\S+[.]so", maps))

        x = torch.randn(2, 1, 8, 8)
        for count, name in enumerate({BUNDLED}, start=1):
            answer = {use}(x)
            assert len(mapped()) == count, mapped()
            assert answer.shape == (2, 10 if name == "digits" else 3)
        if {use == "load(name)"}:
            assert all(torch.equal(load(name)(x), MODELS[name](x)) for name in {BUNDLED})
    """
    environ = {"TMPDIR": str(tmp_path), "PATH": ""}  # no compiler
    assert run_python(program, installed_guide, environ=environ).check().output == ""  # nor PyTorch's false alarms
    assert [path for path in tmp_path.iterdir() if "aoti" in path.name] == []


def test_tools_name_the_bundle_and_the_models_in_it(installed_guide: Path):
    folder = installed_guide / "guide"
    path = run(sys.executable, "-m", "guide._models", "--path", "rows", cwd=installed_guide).check().output
    assert path == f"{folder / 'vision.pt2'}\n"
    listed = run(sys.executable, "-m", "guide._models", cwd=installed_guide).check().output
    assert f"  {folder / 'vision.pt2'} (rows in it): " in listed
    assert f"  {folder / 'scale.pt2'}: " in listed
    text = (folder / "cmake" / "guideConfig.cmake").read_text(encoding="utf-8")
    assert 'set(guide_rows_FILES "${guide_MODELS_DIR}/vision.pt2")\nset(guide_rows_ENTRY rows)\n' in text
    assert "set(guide_scale_ENTRY model)\n" in text
    found = json.loads(run(sys.executable, "-m", "hatch_aoti", "inspect", folder, "--json").check().output)
    bundles = {model["name"]: (model["bundle"], model["artifacts"][0]["entry"]) for model in found["models"]}
    assert bundles["rows"] == ("vision", "rows")
    assert bundles["scale"] == (None, "model")
    [vision] = [file for file in found["files"] if file["name"] == "vision.pt2"]
    assert vision["state"] == "as recorded"
    assert [item["model"] for item in vision["objects"]] == list(BUNDLED)
    said = run(sys.executable, "-m", "hatch_aoti", "inspect", folder).check().output
    assert "from guide.rows:Rows, for cpu, in the bundle vision" in said


# --- Building again -------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(guide: Path, environ: dict[str, str], tmp_path: Path) -> Path:
    """Return a copy of the project elsewhere. The cache has all of its models, and none of its bundles."""
    for bundle in Path(environ["HATCH_AOTI_CACHE_DIR"]).glob("artifacts/*/*/vision*.pt2"):
        shutil.rmtree(bundle.parent)
    return shutil.copytree(guide, tmp_path / "else where")


def bundle_in(wheel: Path, directory: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each model in `vision.pt2`."""
    with zipfile.ZipFile(wheel) as archive:
        package = read_package(Path(archive.extract("guide/vision.pt2", directory)))
    return {model: {name: package.read(model, name) for name in names} for model, names in package.models.items()}


def test_a_build_elsewhere_gives_the_same_bytes_and_a_change_to_one_model_compiles_that_one(
    guide_wheel: Path, copy: Path, build: Builder, tmp_path: Path
):
    again = build(copy, "--wheel", "--outdir", str(tmp_path / "dist")).check().output
    assert again.count("from the cache") == 5
    wheel = tmp_path / "dist" / guide_wheel.name
    assert wheel.read_bytes() == guide_wheel.read_bytes()

    edit(copy, "return x.flatten(1) @ self.weight", "return x.flatten(1) @ self.weight + 1", "guide/rows.py")
    output = build(copy, "--wheel", "--outdir", str(tmp_path / "dist")).check().output
    assert output.count("from the cache") == 4
    [row] = [line for line in output.splitlines() if line.startswith(" rows ")]
    assert "compiled" in row
    before, after = bundle_in(guide_wheel, tmp_path / "before"), bundle_in(wheel, tmp_path / "after")
    assert list(before) == list(after) == list(BUNDLED)
    assert [name for name in BUNDLED if before[name] != after[name]] == ["rows"]


def test_folders_and_editable_trees_get_the_same_bundle_and_changing_bundles_compiles_nothing(
    copy: Path, installed_guide: Path, environ: dict[str, str], tmp_path: Path
):
    expected = (installed_guide / "guide/vision.pt2").read_bytes()
    run(sys.executable, "-m", "hatch_aoti", "build", copy, "--output", tmp_path / "out", environ=environ).check()
    assert (tmp_path / "out" / "vision.pt2").read_bytes() == expected

    editable = [sys.executable, "-c", "import hatchling.build as backend; backend.build_editable('../dist')"]
    run(*editable, cwd=copy, environ=environ).check()
    assert (copy / "guide" / "vision.pt2").read_bytes() == expected
    assert "/vision.pt2\n" in (copy / "guide" / ".gitignore").read_text(encoding="utf-8")

    edit(copy, 'bundle = "vision"', 'bundle = "eyes"')
    output = run(*editable, cwd=copy, environ=environ).check().output
    assert output.count("from the cache") == 5
    names = sorted(path.name for path in (copy / "guide").glob("*.pt2"))
    assert names == ["eyes.pt2", "ranker.pt2", "scale.pt2"]


# --- Putting bundles together ---------------------------------------------------------------------------------------

TARGETS = [Target(name, "linux", "x86_64", name, None, None, (), "") for name in ("x86-64-v4", "x86-64-v3")]
FILES = {"model.so": b"\x7fELF", "model.wrapper_metadata.json": b"{}"}


def settings(name: str, bundle: str | None) -> ModelSettings:
    return ModelSettings(name, model="package:Model", inputs={}, bundle=bundle)


def result(directory: Path, name: str, *, size: int = 0, constants: str = "", external: str | None = None):
    """Return what a build knows of a model that was compiled for both targets, with other files for each."""
    artifacts = []
    for target in TARGETS:
        path = directory / target.name / f"{name}.{target.name}.pt2"
        path.parent.mkdir(parents=True, exist_ok=True)
        files = {**FILES, "model.cpp": f"// {name} for {target.name}".encode()}  # as with `include-sources`
        write_package(path, {"model": files})
        kept = None if external is None else path.with_name(external)
        record = ArtifactRecord(
            program="", constants=constants, target=target, toolchain=ToolchainRecord(compiler="", torch="", torch_git=""),
            options={}, seed=0, verified=NotVerified(),
        )  # fmt: skip
        artifacts.append(Artifact(target.name, "", path, kept, size, False, record, Measured(None)))
    return ModelResult(name, "cpu", Signature((), Constant(None)), tuple(artifacts))


def test_each_target_has_an_archive_of_its_own_with_all_files_of_its_models(tmp_path: Path):
    results = [result(tmp_path / "parts", name) for name in ("a", "b", "c")]
    entries = {name: settings(name, bundle) for name, bundle in {"a": "ab", "b": "ab", "c": None}.items()}
    files = {}
    for place in ("one", "other"):
        locations = locate_models(results, entries, TARGETS, Cache(tmp_path / place))
        files[place] = {location.path.name: location.path.read_bytes() for location in locations.values()}
    assert files["one"] == files["other"]
    assert {key: (location.path.name, location.entry) for key, location in locations.items()} == {
        (name, target.name): (f"{stem}.{target.name}.pt2", entry)
        for name, stem, entry in (("a", "ab", "a"), ("b", "ab", "b"), ("c", "c", "model"))
        for target in TARGETS
    }
    for target in TARGETS:
        package = read_package(locations["a", target.name].path)
        assert package.stem == f"ab.{target.name}"
        assert list(package.models) == ["a", "b"]
        for name in ("a", "b"):
            assert package.read(name, "model.so") == FILES["model.so"]
            assert package.read(name, "model.cpp") == f"// {name} for {target.name}".encode()


def test_a_bundle_is_put_together_anew_when_a_part_is_another(tmp_path: Path):
    cache, entries = Cache(tmp_path / "cache"), {name: settings(name, "ab") for name in ("a", "b")}
    results = [result(tmp_path, name) for name in entries]
    first = locate_models(results, entries, TARGETS, cache)
    assert locate_models(results, entries, TARGETS, cache) == first
    [part, _] = results[0].artifacts
    write_package(part.path, {"model": {**FILES, "model.so": b"\x7fELF, another"}})
    second = locate_models(results, entries, TARGETS, cache)
    changed = [key for key in first if first[key] != second[key]]
    assert changed == [("a", part.target), ("b", part.target)]
    assert read_package(second["a", part.target].path).read("a", "model.so") == b"\x7fELF, another"


def test_a_damaged_part_is_named_and_leaves_no_bundle(tmp_path: Path):
    results = [result(tmp_path, "a")]
    part = results[0].artifacts[0].path
    os.truncate(part, 100)
    with pytest.raises(AotiError, match=f"{part.name} is not a zip archive, or it is damaged"):
        locate_models(results, {"a": settings("a", "ab")}, TARGETS, Cache(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("artifacts/*/*"))


class Notes(list[str]):
    """Stands in for the reporter."""

    def note(self, text: str) -> None:
        self.append(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, True),
        ({"size": 1000}, False),
        ({"external": "constants.safetensors"}, False),
        ({"constants": hashlib.sha256().hexdigest()}, False),
    ],
    ids=["large", "small", "external", "no weights"],
)
def test_equal_weights_in_a_bundle_are_pointed_out(change: dict[str, Any], said: bool, tmp_path: Path):
    about = {"size": 2 << 20, "constants": "ab", **change}
    results = [result(tmp_path, name, **about) for name in ("encode", "decode", "alone")]
    results.append(result(tmp_path, "other", **{**about, "constants": "cd"}))
    entries = {name: settings(name, None if name == "alone" else "text") for name in (r.name for r in results)}
    notes = Notes()
    note_equal_weights(results, entries, notes)
    expected = "bundle text: encode and decode have the same weights, compiled into each of them; `constants ="
    assert [note.startswith(expected) for note in notes] == [True] * said
