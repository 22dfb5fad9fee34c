"""Building blocks for rooms above that add routes to a server."""

from outcore.serve.app import Addition, ClosedEvents, add_errors, create_app
from outcore.serve.body import read_body, read_bytes
from outcore.serve.errors import ApiError, bad
from outcore.serve.gate import FILES, FORM, MOST_BYTES, OPEN_PATHS, Guard, Keys, bearer_of, check_folder, refusal
from outcore.serve.service import Service
from outcore.serve.stopping import Server
