"""Requests to the engine and its answers: sampling, tokens, text."""

from outcore.infer.requests.draws import derived_seed, seed_of
from outcore.infer.requests.fields import KNOWN, own_defaults, sampling_of
from outcore.infer.requests.grammar import Grammar, Grammars, Matcher
from outcore.infer.requests.prompts import Prompts
from outcore.infer.requests.request import Answer, FinishReason, OnPiece, Piece, Request, Timings
from outcore.infer.requests.sampler import Chosen, Row, choose
from outcore.infer.requests.sampling import Sampling
from outcore.infer.requests.text import TextStream
