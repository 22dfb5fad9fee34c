"""A model under OpenAI's API: an HTTP server over `outcore.infer`. Needs requirements/serve.txt."""

from outcore.serve.settings import ServeSettings

__all__ = ["ServeSettings"]
