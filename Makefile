# make: lint, types, fast tests. Set up first: python setup.py --test
PY := .venv/bin/python
ROOM ?=

.PHONY: all lint types test house

all: lint types test

lint:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types:
	.venv/bin/pyright

test:                       # make test ROOM=plan: one room
	$(PY) -m pytest -q -n 2 --dist worksteal $(if $(ROOM),tests/$(ROOM),tests)

house:                      # imports between rooms, circles, what passes a door
	$(PY) -m tests.house
