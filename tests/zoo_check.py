"""Call every case of an installed `zoo_wheel` and compare with eager; print a line for each and exit 1 on any fault."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
import sys

import torch
from torch.utils import _pytree as pytree


def same(got, want):
    """Equal structure, types, dtypes and shapes, and values within the tolerance of the dtype."""
    flat_got, spec_got = pytree.tree_flatten(got)
    flat_want, spec_want = pytree.tree_flatten(want)
    flat_got, flat_want = fields(flat_got), fields(flat_want)
    if spec_got != spec_want or len(flat_got) != len(flat_want):
        return False
    for a, b in zip(flat_got, flat_want, strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return False
            continue
        if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        half = b.dtype in (torch.bfloat16, torch.float16)
        rtol, atol = (2e-2, 1e-2) if half else (1e-3, 1e-4)
        if not torch.allclose(a.detach(), b.detach(), rtol=rtol, atol=atol, equal_nan=True):
            return False
    return True


def fields(leaves):
    """Put the fields of dataclasses, which are leaves to pytree, in their place."""
    found = []
    for leaf in leaves:
        is_instance = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        found += [type(leaf).__name__, *vars(leaf).values()] if is_instance else [leaf]
    return found


def check(case, model):
    """Return one word for each call: `ok` or `refused` where all is well."""
    words = []
    eager = case.module.eval()
    for args, kwargs in case.calls:
        want_args, want_kwargs = copy.deepcopy((args, kwargs))
        got_args, got_kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            want = eager(*want_args, **want_kwargs)
        try:
            got = model(*got_args, **got_kwargs)
        except Exception as error:  # noqa: BLE001
            words.append(f"RAISES {error!r}")
            continue
        untracked = not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(got))
        right = untracked and same(got, want) and same((got_args, got_kwargs), (want_args, want_kwargs))
        words.append("ok" if right else f"WRONG {got} for {want}")
    names = [leaf.path.partition("[")[0] for leaf in model.signature.inputs]
    names += [parameter.name for parameter in model.signature.parameters]
    for args, kwargs in case.bad:
        try:
            model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except (TypeError, ValueError) as error:
            # Python itself counts surplus positional arguments, which have no name.
            named = any(
                re.search(rf"\b(?:{name})\b", str(error)) for name in [*names, *kwargs, "positional arguments?"]
            )
            words.append("refused" if named else f"UNCLEAR {error!r}")
        except Exception as error:  # noqa: BLE001
            words.append(f"UNCLEAR {error!r}")
        else:
            words.append("SILENT")
    return words


def main():
    zoo = importlib.import_module("zoo_wheel.zoo")
    models = importlib.import_module("zoo_wheel._models")
    faults = 0
    for name in zoo.CASES:
        torch.manual_seed(0)
        words = check(zoo.CASES[name](), getattr(models, name))
        faults += any(word not in {"ok", "refused"} for word in words)
        print(f"{name}: {', '.join(words)}")
    print(f"{len(zoo.CASES)} cases, {faults} of them at fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
