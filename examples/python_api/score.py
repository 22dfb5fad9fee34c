"""Which completion does a model find likelier: `python examples/python_api/score.py MODEL`."""

import sys

import outcore

completions = [" blue.", " made of cheese."]
with outcore.LLM(sys.argv[1]) as llm:
    scores = llm.score(["The sky is"] * len(completions), completions)
for completion, score in zip(completions, scores):
    print(f"{score.logprob:8.2f} {completion}")
