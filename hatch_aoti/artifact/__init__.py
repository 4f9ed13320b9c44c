"""Files: what is compiled, kept and packed. Reads and writes, and runs nothing of it."""
