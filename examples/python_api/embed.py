"""Which text is nearest to a question: `python examples/python_api/embed.py MODEL`."""

import sys

import outcore

texts = ["How do I bake bread?", "Flour, water, salt and yeast.", "The train leaves at noon."]
with outcore.LLM(sys.argv[1]) as llm:
    question, *others = [output.outputs.embedding for output in llm.embed(texts)]
for text, other in zip(texts[1:], others):
    print(f"{sum(a * b for a, b in zip(question, other)):.3f} {text}")
