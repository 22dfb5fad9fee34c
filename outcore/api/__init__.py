"""Python API, which `import outcore` offers: the commands' own ways, with errors as exceptions.

Each file is a door: `llm` (with `outputs`), `trainer`, `planning`, `serving`, `loading`; `settings` reads what is said.
What the commands tell on stderr goes to the logger "outcore"; a run tells its progress as ever."""
