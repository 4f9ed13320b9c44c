"""Random graphs on random values, few and always the same; `hatch run fuzz` tries others for as long as one likes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz import OPERATORS, Graph, build, fuzz

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NUMBERS = range(3)


def test_random_graphs_do_what_eager_does_on_random_values(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HATCH_AOTI_CACHE_DIR", environ["HATCH_AOTI_CACHE_DIR"])
    tried = {name for number in NUMBERS for name, _ in Graph(number).steps}
    assert len(tried) >= 20
    assert tried <= set(OPERATORS)
    assert fuzz(build(tmp_path / "project", NUMBERS), NUMBERS, 150) == []
