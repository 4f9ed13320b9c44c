"""From an entry of `[tool.aoti.models]` to an exported program and its calling contract."""
