"""What a project may write under `[tool.aoti]`, and what is wrong with it."""
