"""Commands: generate, chat, score. Each file has `main(argv) -> int`."""
