"""A model under OpenAI's API: an HTTP server over `outcore.infer`. Needs requirements/serve.txt.

Rooms above add routes to the same server: an `Addition`, made of what `outcore.serve.additions` has."""

from outcore.serve.main import NEEDED, open_server, switching_often
from outcore.serve.main import main as serve_main
from outcore.serve.settings import ServeSettings, check_hosts, is_loopback, listen, read_keys
