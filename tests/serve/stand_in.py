"""Stands in for vLLM: its command line, health, answers and events. `MODEL/behaviour.json` says how it behaves."""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["serve"])
parser.add_argument("model", type=Path)
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name")
args, _ = parser.parse_known_args()
behaviour = json.loads((args.model / "behaviour.json").read_text())
with open(args.model / "starts.jsonl", "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "environ": dict(os.environ)}) + "\n")
starts = len((args.model / "starts.jsonl").read_text().splitlines())
if starts > behaviour.get("good_starts", 100):
    sys.exit("stand-in: CUDA error: out of memory")
state = {"healthy": True}


async def key(http: Request, go_on):
    if (
        http.url.path not in ("/health", "/metrics")
        and http.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}"
    ):
        return JSONResponse({"error": {"message": "no key"}}, 401)
    return await go_on(http)


async def health(_):
    return Response(status_code=200 if state["healthy"] else 500)


async def metrics(_):
    return JSONResponse("vllm:num_requests_running 0")


async def models(_):
    return JSONResponse({"data": [{"id": args.served_model_name}]})


async def completions(http: Request):
    body = await http.json()
    if body["prompt"] == "crash":
        os._exit(7)
    if body["prompt"] == "hang":
        state["healthy"] = False
    if body["prompt"] == "bad":
        return JSONResponse({"error": {"message": "bad prompt", "type": "invalid_request_error"}}, 400)
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    if not body.get("stream"):
        choice = {"index": 0, "text": "a b" * body.get("times", 1), "finish_reason": "stop"}
        return JSONResponse({"id": "c-1", "choices": [choice], "usage": usage})

    async def events():
        for text, reason in (("a", None), (" b", "length")):
            choice = {"index": 0, "text": text, "finish_reason": reason}
            yield f"data: {json.dumps({'id': 'c-2', 'choices': [choice]})}\n\n"
            if body["prompt"] == "wait":
                await asyncio.Event().wait()
            if body["prompt"] == "crash later":
                os._exit(7)
        if body["stream_options"]["include_usage"]:
            yield f"data: {json.dumps({'id': 'c-2', 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


routes = [
    Route("/health", health), Route("/metrics", metrics), Route("/v1/models", models),
    Route("/v1/completions", completions, methods=["POST"]),
]  # fmt: skip
app = Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=key)])
uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
