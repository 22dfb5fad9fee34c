"""Commands: generate, chat, score. Each file has `main(argv) -> int`; their common flags are also the server's."""

from outcore.infer.commands.options import add_model_flags, settings_of

__all__ = ["add_model_flags", "settings_of"]
