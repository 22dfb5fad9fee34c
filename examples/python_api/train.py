"""Train adapters on rows of Python, then ask the model: `python examples/python_api/train.py MODEL`."""

import sys

import outcore

rows = [{"prompt": f"What is {a} + {b}?", "completion": f"{a + b}"} for a in range(30) for b in range(30)]
config = outcore.TrainConfig(model_name_or_path=sys.argv[1], lora_r=8, seq_length=64, max_steps=20, run_name="sums")
result = outcore.Trainer(config, dataset=rows).train()
print(f"loss {result.first_loss:.2f} -> {result.last_loss:.2f} in {result.steps} steps: {result.export}")
with outcore.LLM(result.run) as llm:
    print(llm.generate("What is 2 + 3?", temperature=0, max_tokens=4)[0].outputs[0].text)
