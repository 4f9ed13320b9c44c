"""The wheel's software bill of materials (PEP 770), a CycloneDX 1.6 document in `.dist-info/sboms`.

It is the manifest in the terms that scanners read: the models, the files that have them, the weights and saved programs
that they were made of, and the tools that made them. https://cyclonedx.org/docs/1.6/json/ has the format.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from hatch_aoti.compiler.toolchain import ToolchainRecord
    from hatch_aoti.wheel.manifest import Manifest, ModelRecord

__all__ = ["SBOM", "render_sbom"]

SBOM = "hatch-aoti.cdx.json"
"""The name of the document in the wheel's folder `.dist-info/sboms`."""


def render_sbom(manifest: Manifest, *, name: str, version: str, hatchling: str) -> str:
    """Return the document for a wheel of the project `name`; `hatchling` is the version that packs it.

    The same arguments give the same text: it has no time, and its serial number is a hash of the rest.
    """
    subject = _package(name, version)
    components: dict[str, dict[str, Any]] = {}
    depends: dict[str, set[str]] = {subject["bom-ref"]: set()}

    def add(component: dict[str, Any], *on: str) -> str:
        reference: str = component["bom-ref"]
        components[reference] = component
        depends.setdefault(reference, set()).update(on)
        return reference

    tools = {
        add({**_package(tool, number), "scope": "excluded"})
        for tool, number in (("hatch-aoti", manifest.generator.version), ("hatchling", hatchling))
    }
    shared = set()
    if manifest.constants_file is not None:
        shared.add(add(_file(manifest.constants_file.file, manifest.constants_file.sha256)))
    for name_, model in manifest.models.items():
        sources = {add(_file(file, digest, "excluded")) for file, digest in (model.sources or {}).items()}
        made = {
            add(_file(artifact.file, artifact.sha256), *_toolchain(artifact.toolchain, add), *tools, *sources)
            for artifact in model.artifacts
        }
        depends[subject["bom-ref"]].add(add(_model(name_, model), *made, *(shared if model.external_constants else ())))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": [components[reference] for reference in sorted(components)],
        "dependencies": [{"ref": reference, "dependsOn": sorted(depends[reference])} for reference in sorted(depends)],
    }
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _package(name: str, version: str) -> dict[str, Any]:
    # https://github.com/package-url/purl-spec: names of this type are normalised, a `+` in a version is quoted
    purl = f"pkg:pypi/{canonicalize_name(name)}@{quote(version, safe='')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _file(name: str, digest: str, scope: str = "required") -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": hashes, "scope": scope}


def _toolchain(toolchain: ToolchainRecord, add: Any) -> tuple[str, str]:
    """Add the torch and the compiler of an artifact; return what they are called in the document."""
    name, arguments = toolchain.compiler, toolchain.compiler_arguments
    compiler: dict[str, Any] = {
        "type": "application",
        "bom-ref": f"compiler:{name} {arguments}".rstrip(),
        "name": name,
        "scope": "excluded",
        "properties": [{"name": "hatch-aoti:arguments", "value": arguments}],
    }
    number = re.findall(r"\d+(?:\.\d+)+", name)
    if number:
        compiler["version"] = number[-1]
    return add(_package("torch", toolchain.torch)), add(compiler)


def _model(name: str, model: ModelRecord) -> dict[str, Any]:
    facts = {
        "hatch-aoti:source": model.model or model.exported,
        "hatch-aoti:device": model.device,
        "hatch-aoti:targets": ", ".join(artifact.target.name for artifact in model.artifacts),
        "hatch-aoti:program": model.artifacts[0].program,
        "hatch-aoti:constants": model.artifacts[0].constants,
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": f"model:{name}",
        "name": name,
        "scope": "required",
        "properties": [{"name": fact, "value": value} for fact, value in facts.items()],
    }
