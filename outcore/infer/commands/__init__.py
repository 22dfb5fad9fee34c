"""Commands: generate, chat, score. Each file has `main(argv) -> int`; their common flags are also the server's."""

from outcore.infer.commands.journal import JobError, Journal
from outcore.infer.commands.lines import Line, read_line, result_of
from outcore.infer.commands.options import add_model_flags, settings_of

__all__ = ["JobError", "Journal", "Line", "add_model_flags", "read_line", "result_of", "settings_of"]
