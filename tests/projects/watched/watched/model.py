import json
import os
import sys
from pathlib import Path

import torch

try:
    from watched import local_settings
except ImportError:
    local_settings = None

EVERYTHING = dict(os.environ)
PIN = (Path(__file__).parent / "pin.txt").read_text()


class Watched(torch.nn.Module):
    def forward(self, x):
        ours = [name for name in sys.modules if name.partition(".")[0] == "hatch_aoti"]
        (Path(__file__).parent.parent / "loaded.json").write_text(json.dumps(ours))  # last when the model is verified
        return x * 7 + 5
