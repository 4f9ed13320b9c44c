"""Write what follows from the declarations of the settings: the JSON schema, and the tables in the documentation.

`hatch run generate` brings the files up to date; with `--check` it changes nothing, names those that are not, and exits
with 1. A table is between two lines such as

    <!-- settings:begin project: key, meaning, default -->
    <!-- settings:end -->

where `project` stands for `[tool.aoti]`, and so do `models`, `inputs`, `dims` and `variables` (those without a key) for
theirs; or the settings are named, with spaces between them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from hatch_aoti.settings.declaration import REQUIRED, Setting, declared
from hatch_aoti.settings.model import Dim, ModelSettings, Settings, TensorInput
from hatch_aoti.settings.schema import SCHEMA_FILE, generate_schema

HOME = Path(__file__).parent.parent
DOCUMENTS = (HOME / "README.md", *sorted((HOME / "docs").glob("*.md")))

TABLES = {
    "project": [item for item in declared(Settings) if not item.only_variable],
    "variables": [item for item in declared(Settings) if item.only_variable],
    "models": declared(ModelSettings),
    "inputs": declared(TensorInput),
    "dims": declared(Dim),
}
NAMED = {item.key: item for items in TABLES.values() for item in items}

MARKED = re.compile(
    r"^<!-- settings:begin (?P<settings>[a-z -]+): (?P<columns>[a-z, ]+) -->\n(.*?)^<!-- settings:end -->$",
    re.MULTILINE | re.DOTALL,
)


def default(item: Setting) -> str:
    if item.default_text:
        return item.default_text
    if item.default is REQUIRED:
        return "required"
    return f"`{json.dumps(item.default)}`" if isinstance(item.default, (bool, int, float, str)) else "none"


def meaning(item: Setting, document: Path) -> str:
    """Return the description, with a link to what says more unless that is the document itself."""
    file, _, heading = item.see.partition("#")
    if not file or HOME / file == document:
        return item.description
    path = file.removeprefix("docs/") if document.parent.name == "docs" else file
    return f"{item.description} See [{path}]({path}{'#' if heading else ''}{heading})."


def cell(column: str, item: Setting, document: Path) -> str:
    texts = {
        "key": f"`{item.key}`",
        "value": item.kind.noun,
        "variable": f"`{item.variable}`" if item.variable else "",
        "meaning": meaning(item, document),
        "default": default(item),
        "since": item.since,
    }
    return texts[column].replace("|", r"\|")


def with_tables(text: str, document: Path) -> str:
    """Return the text of a document with its tables as they should be."""

    def table(match: re.Match[str]) -> str:
        names, columns = match["settings"], match["columns"].split(", ")
        items = TABLES[names] if names in TABLES else [NAMED[name] for name in names.split()]
        rows = [columns, ["---"] * len(columns), *([cell(name, item, document) for name in columns] for item in items)]
        lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return f"<!-- settings:begin {names}: {match['columns']} -->\n{lines}<!-- settings:end -->"

    return MARKED.sub(table, text)


def generated() -> dict[Path, str]:
    """Return the text that each file should have."""
    schema = json.dumps(generate_schema(), indent=2, ensure_ascii=False) + "\n"
    return {SCHEMA_FILE: schema, **{path: with_tables(path.read_text(encoding="utf-8"), path) for path in DOCUMENTS}}


def stale() -> dict[Path, str]:
    """Return the files that are not as they should be, with the text that they should have."""
    return {
        path: text
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and exit with 1 if a file is stale")
    check = parser.parse_args().check
    for path, text in stale().items():
        print(f"{path.relative_to(HOME)}: {'stale' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale()))


if __name__ == "__main__":
    sys.exit(main())
