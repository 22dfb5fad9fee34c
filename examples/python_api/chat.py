"""One answer of a chat, word by word: `python examples/python_api/chat.py MODEL`."""

import sys

import outcore

messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Why is the sky blue?"}]
with outcore.LLM(sys.argv[1], aim="latency") as llm:
    for piece in llm.stream(messages, max_tokens=64):
        print(piece.text, end="", flush=True)
    print()
    print(llm.chat(messages, temperature=0, max_tokens=64)[0].outputs[0].message)
