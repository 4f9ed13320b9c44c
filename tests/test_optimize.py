"""The rules by which weights are prepacked, and kept inside or outside the compiled object."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hatch_aoti import optimize
from hatch_aoti.optimize import Plan, make_plan
from hatch_aoti.settings import ModelSettings
from hatch_aoti.signature import read_signature


def plan(module, *args, device="cpu", **settings):
    module = module.eval()
    with torch.no_grad():
        program = torch.export.export(module, args)
        output = module(*args)
    signature = read_signature(program, forward=module.forward, args=args, kwargs={}, output=output)
    entry = ModelSettings(name="m", model="p:M", inputs="p:i", **settings)
    return make_plan(program, signature, entry, device=device)


class Stateful(nn.Linear):
    def __init__(self):
        super().__init__(512, 512)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x) + self.count


LARGE, SMALL = (nn.Linear(512, 512), torch.ones(1, 512)), (nn.Linear(10, 16), torch.ones(1, 10))


@pytest.mark.parametrize(
    ("module", "args", "settings", "want"),
    [
        (*SMALL, {}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {}, Plan(freeze=True, external=False, inline=True)),
        (nn.Conv2d(64, 64, 5), torch.ones(1, 64, 8, 8), {}, Plan(freeze=True, external=False, inline=True)),
        (nn.Embedding(1000, 512), torch.tensor([1]), {}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {"optimize": False}, Plan(freeze=False, external=False, inline=False)),
        (*SMALL, {"optimize": True}, Plan(freeze=True, external=False, inline=True)),
        (*LARGE, {"inductor_configs": {"freezing": False}}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {"constants": "external"}, Plan(freeze=False, external=True, inline=True)),
        (Stateful(), torch.ones(1, 512), {}, Plan(freeze=False, external=False, inline=False)),
        (Stateful(), torch.ones(1, 512), {"optimize": True}, Plan(freeze=False, external=False, inline=False)),
    ],
)
def test_the_rule_follows_from_the_graph_and_the_settings_override_it(module, args, settings, want):
    assert plan(module, args, **settings) == want


def test_large_constants_go_outside(monkeypatch):
    monkeypatch.setattr(optimize, "_MOST_EMBEDDED", 1000)
    assert plan(*LARGE) == Plan(freeze=False, external=True, inline=True)
    assert plan(*LARGE, constants="embedded") == Plan(freeze=True, external=False, inline=True)
    assert plan(*LARGE, optimize=True) == Plan(freeze=True, external=False, inline=True)


def test_shared_weights_are_counted_once(monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
            self.out.weight = self.table.weight

        def forward(self, i):
            return self.out(self.table(i))

    monkeypatch.setattr(optimize, "_MOST_EMBEDDED", 100 * 64 * 4)
    assert not plan(Tied(), torch.tensor([1])).external
