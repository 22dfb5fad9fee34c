"""Panels in the browser: train, watch, chat, evaluate, look at the machine. Needs requirements/ui.txt.

`api` has the routes (programs use them too), `panels` draws with them over HTTP and decides nothing, `app` joins both,
`sign_in` asks for a token."""
