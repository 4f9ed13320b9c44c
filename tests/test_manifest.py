"""What a wheel says about itself: the manifest `_models.json`, documented in docs/manifest.md, and the torch it needs."""

from __future__ import annotations

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
