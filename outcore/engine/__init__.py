"""Engines: who moves the bytes. The loop knows only the protocol in `base`."""
