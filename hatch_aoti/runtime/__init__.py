"""What compiled models need where they run.

hatch-aoti copies this folder into each wheel, as `_aoti` beside `_models.py`; changes there are lost with the next
build. Nothing here needs more than the standard library, and torch when a model is first used.
"""

from __future__ import annotations

from .arguments import DEFAULT, Default
from .contract import (
    Constant,
    Dim,
    Group,
    Omitted,
    Parameter,
    SameAsInput,
    Signature,
    Size,
    TensorInput,
    TensorOutput,
)
from .declarations import Build, Gpu, LoadError, LoadOptions, Variant
from .listing import main
from .models import MODELS, Model
from .packages import load

__all__ = [
    "DEFAULT",
    "MODELS",
    "Build",
    "Constant",
    "Default",
    "Dim",
    "Gpu",
    "Group",
    "LoadError",
    "LoadOptions",
    "Model",
    "Omitted",
    "Parameter",
    "SameAsInput",
    "Signature",
    "Size",
    "TensorInput",
    "TensorOutput",
    "Variant",
    "load",
    "main",
]
