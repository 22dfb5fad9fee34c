"""A server beside this program, and one request to it: `python examples/python_api/serve.py MODEL`."""

import json
import sys
from urllib.request import Request, urlopen

import outcore

with outcore.serve(sys.argv[1], port=0, block=False) as server:  # without block=False: until Ctrl-C
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16}).encode()
    request = Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(request) as reply:
        print(json.load(reply)["choices"][0]["text"])
