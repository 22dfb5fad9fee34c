"""Models larger than the GPU answer: generate, score, many requests in one pass over all layers.

`InferenceEngine` takes requests and runs passes; `opening` makes one from a model's name and the machine's room. Below:
`requests` (what is asked, sampling, text), `cache` (pages of keys and values), `attention` (exact over pages),
`schedule` (who goes through the next pass), `passes` (rows through flow)."""

from outcore.infer.engine import InferenceEngine, Speech
from outcore.infer.labels import Labels
from outcore.infer.requests import Answer, Piece, Request, Sampling
from outcore.infer.thread import EngineThread
