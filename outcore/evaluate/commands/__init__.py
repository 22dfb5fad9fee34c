"""Commands: evaluate, evaluations, serve (with evaluation's routes). Each file has `main(argv) -> int`."""
