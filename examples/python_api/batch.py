"""Many prompts in one job, with weights packed in 4 bits: `python examples/python_api/batch.py MODEL`."""

import sys

import outcore

prompts = [f"The capital of {country} is" for country in ("France", "Japan", "Kenya", "Peru")]
params = outcore.SamplingParams(temperature=0.7, max_tokens=16, n=2, seed=1)
with outcore.LLM(sys.argv[1], quantize="nf4", aim="throughput") as llm:
    for output in llm.generate(prompts, params):
        print(output.prompt, [answer.text for answer in output.outputs])
