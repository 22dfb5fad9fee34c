"""Endpoints, one family a file."""
