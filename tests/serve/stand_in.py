"""Stands in for vLLM: its command line, health, answers and events. `MODEL/behaviour.json` says how it behaves."""

import argparse
import json
import os
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request

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
app = FastAPI()
state = {"healthy": True}


@app.middleware("http")
async def key(http: Request, go_on):
    if (
        http.url.path not in ("/health", "/metrics")
        and http.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}"
    ):
        return JSONResponse({"error": {"message": "no key"}}, 401)
    return await go_on(http)


@app.get("/health")
async def health():
    if not state["healthy"]:
        raise HTTPException(500)


@app.get("/metrics")
async def metrics():
    return JSONResponse("vllm:num_requests_running 0")


@app.get("/v1/models")
async def models():
    return {"data": [{"id": args.served_model_name}]}


@app.post("/v1/completions")
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
        return {"id": "c-1", "choices": [{"index": 0, "text": "a b", "finish_reason": "stop"}], "usage": usage}

    async def events():
        for text, reason in (("a", None), (" b", "length")):
            choice = {"index": 0, "text": text, "finish_reason": reason}
            yield f"data: {json.dumps({'id': 'c-2', 'choices': [choice]})}\n\n"
            if body["prompt"] == "crash later":
                os._exit(7)
        if body["stream_options"]["include_usage"]:
            yield f"data: {json.dumps({'id': 'c-2', 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
