"""Admission to a server: checks of names, origins, bodies, keys, folders and connections."""

from outcore.serve.gate.bodies import MOST_BYTES, let_go
from outcore.serve.gate.connections import Connection
from outcore.serve.gate.folders import check_folder
from outcore.serve.gate.guard import FILES, FORM, Guard, refusal
from outcore.serve.gate.keys import OPEN_PATHS, KeyCheck, Keys, bearer_of
