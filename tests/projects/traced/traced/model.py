import json
import os
import pathlib

import torch
from safetensors.torch import load_file

from . import helper  # noqa: F401

here = pathlib.Path(__file__).parent
config = json.loads((here / "config.json").read_text())
parts = sorted(os.listdir(here / "parts"))
size = os.environ.get("TRACED_SIZE", "1")
weights = load_file(here.parent / "weights.safetensors")
more = torch.load(here.parent / "weights.pt", weights_only=True)
raw = torch.from_file(str(here / "raw.bin"), size=4, dtype=torch.uint8)
storage = torch.UntypedStorage.from_file(str(here / "storage.bin"), False, 4)
