"""What a wheel says about itself: the manifest `_models.json`, documented in docs/manifest.md, and the torch it needs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import REPOSITORY, run_python

import hatch_aoti
from hatch_aoti.compiler.gpu import BuilderGpu
from hatch_aoti.export.digests import constants_digest, program_digest
from hatch_aoti.wheel.inspection import inspect_path
from hatch_aoti.wheel.manifest import FileRecord, ManifestError, parse_manifest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def manifest(example_wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(example_wheel) as archive:
        return json.loads(archive.read("example_project/_models.json"))


def test_the_manifest_names_the_tools_that_made_the_wheel(manifest: dict[str, Any], example_wheel: Path):
    assert manifest["schema"] == 1
    assert manifest["generator"] == {"name": "hatch-aoti", "version": hatch_aoti.__version__}
    assert manifest["package"] == "example_project"
    assert manifest["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert example_wheel.stem.endswith(f"-{manifest['platform_tag']}")
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    for model in manifest["models"].values():
        for artifact in model["artifacts"]:
            assert artifact["toolchain"] == {
                "compiler": compiler,
                "compiler_arguments": "",
                "environment": {},
                "torch": str(torch.__version__),
                "torch_git": torch.version.git_version,
            }


def test_the_manifest_says_what_each_artifact_was_compiled_for_and_how(manifest: dict[str, Any]):
    assert list(manifest["models"]) == ["digits", "ranker"]
    for model in manifest["models"].values():
        [artifact] = model["artifacts"]
        assert artifact["target"]["name"] == "x86-64-v3"
        assert artifact["target"]["march"] == "x86-64-v3"
        assert "avx2" in artifact["target"]["features"]
        assert artifact["options"]["cpp.march"] == "x86-64-v3"
        assert artifact["options"]["cpp.simdlen"] == 256
        assert artifact["options"]["cpp.dynamic_threads"] is True
        assert artifact["seed"] == 0
        assert artifact["verified"]
    assert manifest["models"]["digits"]["weights"] == "weights/digits.safetensors"
    assert manifest["models"]["ranker"]["model"] == "example_project.ranker:build"


def test_the_manifest_identifies_the_files_of_the_wheel(manifest: dict[str, Any], example_wheel: Path):
    with zipfile.ZipFile(example_wheel) as archive:
        for name, model in manifest["models"].items():
            [artifact] = model["artifacts"]
            data = archive.read(f"example_project/{artifact['file']}")
            assert artifact["file"] == f"{name}.pt2"
            assert artifact["bytes"] == len(data)
            assert artifact["sha256"] == hashlib.sha256(data).hexdigest()
            with zipfile.ZipFile(io.BytesIO(data)) as package:
                assert package.read(f"{name}/.data/serialization_id").decode() == artifact["id"]


def test_the_manifest_has_hashes_of_the_program_and_of_its_constants(manifest: dict[str, Any]):
    artifacts = [model["artifacts"][0] for model in manifest["models"].values()]
    for key in ("program", "constants"):
        assert all(re.fullmatch("[0-9a-f]{64}", artifact[key]) for artifact in artifacts)
        assert len({artifact[key] for artifact in artifacts}) == len(artifacts)


def test_the_program_hash_covers_code_and_constants_and_the_constants_hash_only_those():
    class Affine(torch.nn.Module):
        def __init__(self, factor: float, *, twice: bool = False):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.full((4,), factor))
            self.twice = twice

        def forward(self, x):
            return x * self.factor * 2 if self.twice else x * self.factor

    def hashes(module: torch.nn.Module) -> tuple[str, str]:
        program = torch.export.export(module, (torch.zeros(3, 4),))
        return program_digest(program), constants_digest(program)

    program, constants = hashes(Affine(1.5))
    assert hashes(Affine(1.5)) == (program, constants)
    other_weights = hashes(Affine(1.25))
    assert other_weights[0] != program
    assert other_weights[1] != constants
    other_code = hashes(Affine(1.5, twice=True))
    assert other_code[0] != program
    assert other_code[1] == constants


def test_every_key_of_the_manifest_is_documented(manifest: dict[str, Any]):
    text = (REPOSITORY / "docs" / "manifest.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    model = manifest["models"]["digits"]
    artifact = model["artifacts"][0]
    keys = {*manifest, *model, *artifact, *(f"toolchain.{key}" for key in artifact["toolchain"])}
    keys |= {f"target.{key}" for key in artifact["target"]}
    keys |= {f"gpu.{field.name}" for field in dataclasses.fields(BuilderGpu)} | {"gpu.architectures"}
    assert documented == {*keys, "constants_file", "debug"}


# Keys that came after the first manifests of this format, by where they are.
LATER = {
    "": ("environment", "files"),
    "models": ("bundle", "exported", "external_constants", "gpu", "operators", "sources", "weights"),
    "artifacts": ("entry", "folded_on", "id"),
    "toolchain": ("compiler_arguments", "environment"),
}


def older(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest as the first ones of this format were."""

    def without(data: dict[str, Any], where: str) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in LATER[where]}

    models = {}
    for name, model in manifest["models"].items():
        artifacts = [
            {**without(artifact, "artifacts"), "toolchain": without(artifact["toolchain"], "toolchain")}
            for artifact in model["artifacts"]
        ]
        models[name] = {**without(model, "models"), "artifacts": artifacts}
    return {**without(manifest, ""), "models": models}


def test_what_is_written_is_what_is_read(example_wheel: Path):
    with zipfile.ZipFile(example_wheel) as archive:
        text = archive.read("example_project/_models.json")
    read = parse_manifest(text)
    assert read.render().encode() == text
    assert read.models["digits"].artifacts[0].target.name == "x86-64-v3"
    assert read.models["digits"].signature.inputs[0].dtype == "float32"


def test_constants_and_marks_of_a_debug_build_are_there_only_where_there_are_any(manifest: dict[str, Any]):
    assert not {"debug", "constants_file"} & manifest.keys()
    more = {"debug": {"A": "1"}, "constants_file": {"file": "_models.safetensors", "sha256": "ab", "bytes": 2}}
    text = json.dumps({**manifest, **more}, indent=2, sort_keys=True) + "\n"
    read = parse_manifest(text.encode())
    assert read.render() == text
    assert read.model_files()["_models.safetensors"] == FileRecord("ab", 2)
    assert "_models.safetensors" not in parse_manifest(json.dumps(manifest).encode()).model_files()


def test_an_older_manifest_is_read_and_what_it_does_not_say_is_not_made_up(
    manifest: dict[str, Any], example_wheel: Path, tmp_path: Path
):
    data = json.dumps(older(manifest)).encode()
    read = parse_manifest(data)
    assert (read.files, read.environment) == ({}, None)
    [artifact] = read.models["digits"].artifacts
    assert (artifact.entry, artifact.id) == ("model", "")
    with zipfile.ZipFile(example_wheel) as archive:
        archive.extractall(tmp_path)
    expected = inspect_path(tmp_path / "example_project")
    (tmp_path / "example_project" / "_models.json").write_bytes(data)
    assert inspect_path(tmp_path / "example_project") == expected
    with pytest.raises(ManifestError, match="did not record the hashes of all files"):
        read.all_files()


def test_a_newer_manifest_of_the_same_format_is_read_without_what_is_new(manifest: dict[str, Any]):
    newer = copy.deepcopy(manifest)
    newer["news"] = newer["models"]["digits"]["news"] = newer["models"]["digits"]["artifacts"][0]["news"] = [1]
    assert parse_manifest(json.dumps(newer).encode()) == parse_manifest(json.dumps(manifest).encode())


WRONG = {
    "missing": (lambda manifest: manifest.pop("package"), "it has no 'package'"),
    "of a wrong type": (lambda manifest: manifest.update(files={"a": 5}), "files.a must be an object, not 5"),
    "missing in a model": (
        lambda manifest: manifest["models"]["digits"].pop("device"),
        "models.digits has no 'device'",
    ),
    "no signature": (
        lambda manifest: manifest["models"]["digits"].update(signature={}),
        "models.digits.signature is no",
    ),
    "no verdict": (
        lambda manifest: manifest["models"]["digits"]["artifacts"][0].update(verified={"enabled": 1}),
        "models.digits.artifacts[0].verified.enabled must be False, not 1",
    ),
}


@pytest.mark.parametrize(("harm", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_in_a_manifest_is_named(harm: Any, message: str, manifest: dict[str, Any]):
    harmed = copy.deepcopy(manifest)
    harm(harmed)
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(harmed).encode())
    assert str(caught.value).startswith("is not a manifest of hatch-aoti, or it is damaged: ")
    assert message in str(caught.value)


def test_an_older_torch_is_refused_with_both_versions(installed_example: Path):
    program = """
        import torch
        built = torch.__version__
        torch.__version__ = "2.12.1+cpu"
        from example_project._models import LoadError, load, ranker
        for use in (lambda: ranker(torch.zeros(1, 10)), lambda: load("ranker")):
            try:
                use()
            except LoadError as error:
                print(built, error)
    """
    output = run_python(program, installed_example).check().output.splitlines()
    assert len(output) == 2
    for line in output:
        built, _, error = line.partition(" ")
        assert f"compiled with torch {built}" in error
        assert "this is torch 2.12.1+cpu" in error
        assert 'pip install "torch>=2.13"' in error
