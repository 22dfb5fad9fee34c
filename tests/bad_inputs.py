"""What people get wrong, as data: `python tests/bad_inputs.py --write` runs all and writes docs/bad_inputs.md.

tests/test_bad_inputs.py runs every case and checks exit code, message and disk, and that the table is of these cases.
`--show ID...` prints the whole output of some.
"""

import gzip
import re
import sys
import tempfile
from pathlib import Path

from tests.bad_inputs_setups import (
    all_damaged,
    copied_run,
    damaged_manifest,
    damaged_weights,
    ds_config,
    file,
    filling_drive,
    flipped_bit,
    full_drive,
    missing_layer,
    missing_manifest,
    newest_damaged,
    no_gpu,
    no_libaio,
    nvme_in_use,
    offline,
    pickled_weights,
    ram_disk,
    read_only,
    rows,
    small_drive,
    small_vocabulary,
    truncated_shard,
    weights_only,
)
from tests.bad_inputs_world import LEAVES, REPOSITORY, TWO_HOSTS, Case, NotHere, Outcome, Shared, run_case

TABLE = REPOSITORY / "docs/bad_inputs.md"
LONGEST = 420
OWN_MODEL = "from torch import nn\ndef build(config, tokenizer):\n    return {}\n"
BAD_ROW = '{"text": "no end'
GOOD_ROWS = [{"text": f"a fine row about the number {i}, long enough to be read"} for i in range(40)]
CHAT = {"prompt": "What is it?", "completion": ""}

CASES: list[Case] = [
    # --- the command line
    Case("unknown-flag", "a flag that does not exist", "--frobnicate 3", 2, ("unknown flag --frobnicate",)),
    Case("misspelt-flag", "a misspelt flag", "--learning_rat 1e-4", 2, ("Did you mean --learning_rate?",)),
    Case("flag-without-value", "a flag without its value", "--max_steps", 2, ("--max_steps needs a value",)),
    Case("no-dashes", "an argument that is no flag", "train.txt", 2, ("'train.txt'", "--name value")),
    Case("not-a-number", "a word where a number belongs", "--max_steps ten", 2,
         ("max_steps", "whole number", "'ten'")),
    Case("half-a-step", "a fraction where a whole number belongs", "--save_steps 2.5", 2, ("save_steps", "2.5")),
    Case("not-a-switch", "a switch that is neither on nor off", "--deterministic maybe", 2, ("true or false",)),
    Case("other-tools-flag", "a flag of another tool", "--bf16", 2, ("unknown flag --bf16", "--precision bf16")),
    Case("below-zero", "a learning rate below zero", "--learning_rate -1e-4", 2, ("learning_rate", "above 0")),
    Case("stop-without-evaluation", "early stopping without evaluations", "--early_stopping_patience 2", 2,
         ("early_stopping_patience", "--eval_steps above 0")),
    Case("changes-of-nothing", "changes of a run that is not resumed", "--continue_with_changes", 2,
         ("continue_with_changes", "--resume_from_checkpoint auto")),
    Case("weight-of-zero", "a source with a weight of 0", "--dataset {data}/a:0", 2, ("weight", "above 0")),
    Case("hub-name", "a hub repository without an owner", "--push_to_hub model", 2, ("push_to_hub", "ORG/NAME")),
    Case("overrides", "overrides that are not JSON", "--config_overrides layers=4", 2,
         ("config_overrides", "not JSON")),
    Case("chat-template", "a chat template that is none", "--chat_template {here}/chat.jinja", 2,
         ("line 1", "not a Jinja template"), setup=file("chat.jinja", "{% for m in messages %}")),
    Case("choice-typo", "a misspelt choice", "--precision bf61", 2, ("bf16, fp16, fp32", "Did you mean bf16?")),
    Case("out-of-range", "a share above one", "--eval_fraction 1.5", 2, ("eval_fraction", "below 1")),
    Case("zero-steps", "a run of no steps", "--max_steps 0", 2, ("max_steps", "above 0")),
    Case("infinite-rate", "a learning rate that is no number", "--learning_rate inf", 2, ("learning_rate", "inf")),
    Case("warmup-too-long", "a warm-up longer than the run", "--warmup_steps 9 --max_steps 5", 2, ("9", "5", "more")),
    Case("two-models", "two models at once", "--preset tiny --model gpt2", 2, ("contradict each other", "one model")),
    Case("stage-and-offload", "a stage without offload, and offload", "--zero_stage none --offload_optimizer nvme", 2,
         ("contradict each other", "--zero_stage infinity")),
    Case("engine-and-stage", "a stage that the engine does not have", "--engine stream --zero_stage zero2", 2,
         ("contradict each other", "--engine deepspeed")),
    Case("alpha-without-rank", "a LoRA setting without LoRA", "--lora_alpha 32", 2, ("lora_r", "--lora_r 16")),
    Case("quantize-without-rank", "a packed base that would be trained", "--quantize nf4 --engine stream", 2,
         ("add --lora_r 16",)),
    Case("quantize-deepspeed", "a packed base with DeepSpeed", "--quantize nf4 --lora_r 4", 2,
         ("quantize is a setting of the streaming engine",)),
    Case("muon-lora", "Muon for adapters", "--engine stream --optimizer muon --lora_r 4", 2,
         ("trains whole matrices",)),
    Case("muon-8-bit", "Muon with 8-bit moments", "--engine stream --optimizer muon --state_format split8",
         2, ("momentum in fp32",)),
    Case("run-name-path", "a path as the run's name", "--run_name a/b", 2, ("run_name", "without slashes")),
    Case("aio-block", "gigabytes in one drive request", "--aio_block_size 1e18", 2, ("aio_block_size", "1048576")),
    Case("report-to-typo", "a misspelt tracker", "--report_to tensorbord", 2, ("Did you mean 'tensorboard'?",)),
    Case("fp16-on-cpu", "16-bit floats that the CPU does not have", "--precision fp16", 2,
         ("fp16 needs a GPU", "--precision bf16 or fp32"), setup=no_gpu),
    # --- the YAML file
    Case("yaml-missing", "a settings file that is not there", "--config {here}/run.yaml", 2, ("no such file",)),
    Case("yaml-broken", "a settings file that is not YAML", "--config {here}/run.yaml", 2,
         ("line 3: not readable as YAML",), setup=file("run.yaml", "seed: 1\nlora_r: [1, 2\nsave_steps: 3\n")),
    Case("yaml-list", "a list instead of settings", "--config {here}/run.yaml", 2, ("`name: value`", "list"),
         setup=file("run.yaml", "- seed\n- 1\n")),
    Case("yaml-unknown-key", "a misspelt setting in the file", "--config {here}/run.yaml", 2,
         ("unknown setting 'warmup_step'", "Did you mean warmup_steps?"), setup=file("run.yaml", "warmup_step: 3\n")),
    Case("yaml-twice", "one setting twice in the file", "--config {here}/run.yaml", 2, ("seed", "twice"),
         setup=file("run.yaml", "seed: 1\nlora_r: 4\nseed: 2\n")),
    Case("yaml-two-names", "one setting under two names", "--config {here}/run.yaml", 2,
         ("learning_rate", "twice", "'lr'"),
         setup=file("run.yaml", "learning_rate: 0.1\nlr: 0.2\n")),
    Case("yaml-wrong-type", "a list where a text belongs", "--config {here}/run.yaml", 2, ("sample_prompt", "list"),
         setup=file("run.yaml", "sample_prompt: [a, b]\n")),
    Case("yaml-no-value", "a setting without a value", "--config {here}/run.yaml", 2,
         ("attn_implementation", "has no value", "delete the line"), setup=file("run.yaml", "attn_implementation:\n")),
    Case("yaml-not-utf8", "a settings file in another encoding", "--config {here}/run.yaml", 2, ("UTF-8",),
         setup=file("run.yaml", "sample_prompt: Grün\n".encode("utf-16"))),
    # --- deepspeed_config.json
    Case("ds-missing", "no DeepSpeed configuration", "--deepspeed_config {here}/ds.json", 2, ("no such file",)),
    Case("ds-not-json", "a missing comma", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json, line 3", "not valid JSON"),
         setup=file("ds.json", '{\n "gradient_clipping": 1.0\n "steps_per_print": 10\n}\n')),
    Case("ds-unknown-key", "a misspelt key, which DeepSpeed would ignore", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json", "'gradient_cliping'", "silently ignore", "Did you mean 'gradient_clipping'?"),
         setup=ds_config(gradient_cliping=0.5)),
    Case("ds-nested-key", "a misspelt key in a block", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json: DeepSpeed has no key zero_optimization.overlap_com", "Did you mean 'overlap_comm'?"),
         "empty folders", ds_config(zero_optimization={"stage": 3, "overlap_com": True})),
    Case("ds-no-block", "a text where a block belongs", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json: 'optimizer'", "JSON object", "'AdamW'"), setup=ds_config(optimizer="AdamW")),
    Case("ds-wrong-type", "a word where a switch belongs", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json: DeepSpeed cannot read zero_optimization.overlap_comm", "boolean", "'x'"), "empty folders",
         ds_config(zero_optimization={"stage": 3, "overlap_comm": "x"})),
    Case("ds-wrong-block", "a number where a block belongs", "--deepspeed_config {here}/ds.json", 2,
         ("ds.json: DeepSpeed cannot read comms_logger", "its value is 3"), "empty folders", ds_config(comms_logger=3)),
    Case("ds-key-twice", "one key twice", "--deepspeed_config {here}/ds.json", 2, ("gradient_clipping", "twice"),
         setup=file("ds.json", '{"gradient_clipping": 1.0,\n "gradient_clipping": 2.0}')),
    Case("ds-batch-arithmetic", "batch sizes that do not multiply", "--deepspeed_config {here}/ds.json "
         "--per_device_train_batch_size none --gradient_accumulation_steps none", 2,
         ("train_batch_size 7", "= 8", "Remove one"),
         "empty folders", ds_config(train_batch_size=7)),
    Case("ds-two-precisions", "bf16 and fp16 both enabled", "--deepspeed_config {here}/ds.json", 2,
         ("bf16.enabled and fp16.enabled", "contradict"), "empty folders",
         ds_config(bf16={"enabled": True}, fp16={"enabled": True})),
    Case("ds-scheduler", "a schedule that does not exist", "--deepspeed_config {here}/ds.json", 2,
         ("'WarmupDecay'", "Did you mean WarmupDecayLR"), "empty folders", ds_config(scheduler={"type": "WarmupDecay",
         "params": {}})),
    # --- where the data is
    Case("data-missing", "a file that is not there", "--dataset '{data}/a test.txt'", 2,
         ("no such file", "nearest: 'a text.txt'"), "empty folders"),
    Case("paths-with-spaces", "nothing: spaces in every path",
         "--dataset '{data}/a text.txt' --checkpoint_dir '{here}/my saves' --log_dir '{here}/my logs' "
         "--export_dir '{here}/my models'", 0,
         ("(AutoModelForCausalLM.from_pretrained loads it)", "DIR/my models/new"), "the run"),
    Case("data-deep-missing", "a folder on a drive that is not mounted", "--dataset {here}/usb/books/all", 2,
         ("no such file or folder", "only DIR exists", "mounted"), "empty folders"),
    Case("data-windows", "a Windows path under Linux", r"--dataset 'C:\Users\me\my data.jsonl'", 2,
         ("Windows path", "/mnt/c/Users/me/my data.jsonl"), "empty folders"),
    Case("data-unc", "a Windows network share", r"--dataset '\\server\share\data.jsonl'", 2,
         ("network share", "Mount it", "//server/share"), "empty folders"),
    Case("data-wsl-unc", "Windows' name for a file of WSL", r"--dataset '\\wsl$\Ubuntu\home\me\x.txt'", 2,
         ("/home/me/x.txt",), "empty folders"),
    Case("data-empty-file", "an empty file", "--dataset {here}/a.txt", 2,
         ("is empty",), "empty folders", file("a.txt")),
    Case("data-empty-folder", "a folder without text", "--dataset {here}/photos", 2, ("no non-empty", "1 x .jpg"),
         "empty folders", file("photos/a.jpg", b"\xff\xd8")),
    Case("data-extension", "a kind of file that is not read", "--dataset {here}/a.docx", 2, (".docx", ".jsonl"),
         "empty folders", file("a.docx", b"PK")),
    Case("data-offline", "a hub data set without a network", "--dataset someone/some-data", 2,
         ("hub cannot be reached", "embedded"), "empty folders", offline),
    Case("data-embedded-typo", "the built-in text, misspelt", "--dataset embeded", 2, ("nearest: 'embedded'",),
         "empty folders"),
    Case("cache-is-file", "a file where the token cache should go", "--data_cache_dir {here}/cache", 2,
         ("token cache cannot be written", "--data_cache_dir"), "empty folders", file("cache", "x")),
    # --- what is in the data
    Case("data-no-column", "a column that is not there", "--dataset {here}/a.jsonl --text_column txt", 2,
         ("no column 'txt'", "nearest: 'text'"), "empty folders", rows("a.jsonl", *GOOD_ROWS)),
    Case("data-no-shape", "rows of an unknown shape", "--dataset {here}/a.jsonl", 2,
         ("no known shape", "prompt_column"),
         "empty folders", rows("a.jsonl", {"a": 1, "b": 2})),
    Case("data-half-pair", "a prompt column without its completion", "--dataset {here}/a.jsonl --prompt_column q", 2,
         ("prompt_column and completion_column go together",), "empty folders", rows("a.jsonl", {"q": "1",
         "a": "2"})),
    Case("data-column-of-text", "a column of a plain text", "--text_column text", 2, ("plain text", "no columns"),
         "empty folders"),
    Case("data-bad-row", "a malformed row", "--dataset {here}/a.jsonl", 2,
         ("a.jsonl, line 41", "not valid JSON", "skip"),
         "empty folders", rows("a.jsonl", *GOOD_ROWS, BAD_ROW)),
    Case("data-bad-row-skipped", "malformed rows, to be skipped", "--dataset {here}/a.jsonl --on_bad_row skip", 0,
         ("left out: 2 malformed rows", "line 41"), "the run", rows("a.jsonl", *GOOD_ROWS, BAD_ROW, [1, 2])),
    Case("data-all-bad", "no row that can be read", "--dataset {here}/a.jsonl --on_bad_row skip", 2,
         ("no usable row", "line 1: not valid JSON"), "empty folders", rows("a.jsonl", BAD_ROW, BAD_ROW)),
    Case("data-not-utf8", "a text in another encoding", "--dataset {here}/a.txt", 2,
         ("byte offset 10 (0xfc)", "iconv"), "empty folders", file("a.txt", "Das ist gr\xfcn.\n".encode("latin-1"))),
    Case("data-utf16", "a text as Windows' Notepad saves Unicode", "--dataset {here}/a.txt", 2, ("UTF-16", "iconv"),
         "empty folders", file("a.txt", "some text\n".encode("utf-16"))),
    Case("data-binary", "a binary file with a text's name", "--dataset {here}/a.txt", 2,
         ("binary file", "byte offset 3"),
         "empty folders", file("a.txt", b"ELF\0\1\2")),
    Case("data-ragged-csv", "a line with a field too many", "--dataset {here}/a.csv", 2,
         ("a.csv, line 3", "3 fields where the header has 2"), "empty folders",
         file("a.csv", "prompt,completion\na,b\nc,d,e\n")),
    Case("data-semicolons", "a csv with semicolons", "--dataset {here}/a.csv", 2, ("separated by semicolons",),
         "empty folders", file("a.csv", "prompt;completion\na;b\n")),
    Case("data-cut-gzip", "a compressed file cut short", "--dataset {here}/a.jsonl.gz", 2, ("damaged or cut short",),
         "empty folders", file("a.jsonl.gz", gzip.compress(b'{"text": "one two three"}\n' * 99)[:-12])),
    Case("data-cut-parquet", "a damaged parquet file", "--dataset {here}/a.parquet", 2, ("not a readable parquet",),
         "empty folders", file("a.parquet", b"PAR1 and then nothing")),
    Case("data-all-masked", "completions that are all empty", "--dataset {here}/a.jsonl", 2,
         ("line 1: column 'completion' is empty", "--on_bad_row skip"), "empty folders", rows("a.jsonl", CHAT, CHAT)),
    Case("data-half-weight", "an answer of half a weight", "--dataset {here}/a.jsonl", 2,
         ("a.jsonl, line 1", "weight 0.5", "only 0 (no loss) and 1"), "empty folders",
         rows("a.jsonl", {"messages": [{"role": "user", "content": "a fox?"},
                                       {"role": "assistant", "content": "a dog", "weight": 0.5}]})),
    Case("data-images", "pictures beside the text", "--dataset {here}/a.jsonl", 2,
         ("a.jsonl, line 1", "column 'images'", "only text can be trained"), "empty folders",
         rows("a.jsonl", {"prompt": "<image> what?", "completion": "a dog", "images": ["dog.png"]})),
    Case("data-half-character", "half of an emoji", "--dataset {here}/a.jsonl", 2,
         ("a.jsonl, line 1", "half of a surrogate pair (U+D83D)"), "empty folders",
         rows("a.jsonl", '{"text": "a smile \\ud83d that was cut in two"}')),
    Case("data-two-losses", "loss on everything and on the last answer only",
         "--train_on_prompt true --train_on_last_turn true", 2, ("train_on_prompt", "choose one of them"),
         "empty folders"),
    Case("data-prompts-too-long", "prompts longer than a row", "--dataset {here}/a.jsonl", 2,
         ("seq_length 32", "Raise seq_length"), "empty folders",
         rows("a.jsonl", *[{"prompt": "why " * 90, "completion": f"because {i}"} for i in range(9)])),
    Case("eval-missing", "evaluation data that is not there", "--eval_dataset {here}/valid.jsonl", 2,
         ("no such file", "valid.jsonl"),
         "empty folders"),
    # --- the model
    Case("preset-typo", "a misspelt preset", "--preset lama-1b", 2, ("lama-1b", "llama-1b"), "nothing"),
    Case("seq-too-long", "rows longer than the model's positions", "--preset gpt2 --seq_length 4096", 2,
         ("4096", "1024 positions", "--seq_length 1024"), "nothing"),
    Case("model-missing", "a model folder that is not there", "--model_name_or_path {here}/qwen", 2,
         ("model_name_or_path", "is not a folder here"), "nothing"),
    Case("model-windows", "a Windows path under Linux", r"--model_name_or_path 'D:\models\qwen'", 2,
         ("Windows spelling", "/mnt/d/models/qwen"), "nothing"),
    Case("model-no-config", "a folder that holds no model", "--model_name_or_path {here}/m", 2,
         ("holds no config.json",),
         "nothing", file("m/readme.md", "x")),
    Case("model-gguf", "a GGUF file", "--model_name_or_path {here}/m.gguf", 2,
         ("m.gguf cannot be read as a GGUF file",),
         "nothing", file("m.gguf", "GGUF")),
    Case("model-pickle", "weights as a pickle", "--model_name_or_path {here}/model", 2,
         ("no *.safetensors", "pickle, which is not read"), "nothing", pickled_weights),
    Case("model-cut", "a weights file cut short", "--model_name_or_path {here}/model", 1,
         ("damaged or cut short", "Copy or download"), "empty folders", damaged_weights),
    Case("model-incomplete", "a config with more layers than the weights have",
         "--model_name_or_path {here}/model", 1,
         ("lacks", "does not hold a whole"), "empty folders", missing_layer),
    Case("model-offline", "a hub model without a network", "--model_name_or_path someone/some-model", 1,
         ("hub cannot be reached", "--preset tiny"), "nothing", offline),
    Case("tokenizer-too-large", "a tokenizer of another model",
         "--model_name_or_path {model} --tokenizer_name_or_path {here}/tokenizer", 2,
         ("do not belong together", "Use the tokenizer"), "empty folders", small_vocabulary),
    Case("tokenizer-missing", "a folder without a tokenizer", "--tokenizer_name_or_path {here}/t", 2,
         ("no tokenizer in it",), "empty folders", file("t/x.txt", "x")),
    Case("attention-typo", "a misspelt attention", "--attn_implementation spda", 2,
         ("'spda'", "Did you mean 'sdpa'?"),
         "nothing"),
    Case("attention-capped", "sdpa for a model that caps the logits of attention",
         "--config_file {here}/gemma.json --attn_implementation sdpa", 2,
         ("caps the logits of attention (at 50)", "--attn_implementation auto"), "empty folders",
         file("gemma.json", '{"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 32, '
              '"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9000}')),
    Case("packing-t5", "packing with an encoder-decoder", "--preset tiny-t5 --packing on", 2,
         ("packing on", "encoder-decoder", "--packing off"), "empty folders"),
    Case("lora-target", "a LoRA target that the model lacks", "--lora_r 4 --lora_target_modules q_prj", 2,
         ("no module 'q_prj'", "Did you mean 'q_proj'"), "empty folders"),
    Case("lora-experts", "LoRA on the experts of a mixture",
         "--preset tiny-moe --lora_r 4 --lora_target_modules q_proj,gate_proj,up_proj", 2,
         ("gate_proj, up_proj for parts of this model's experts", "write experts for all of them"), "empty folders"),
    Case("lora-tied-head", "LoRA on a tied head of an encoder-decoder",
         "--preset tiny-t5 --lora_r 4 --lora_target_modules q,lm_head", 2,
         ("lm_head.weight shares its weights", "Leave out 'lm_head'"), "empty folders"),
    Case("own-no-file", "an own model's file that is not there", "--model_module {here}/mine.py:build", 2,
         ("there is no file",), "empty folders"),
    Case("own-no-function", "a function that the file lacks", "--model_module {here}/mine.py:biuld", 2,
         ("no function 'biuld'", "Did you mean 'build'?"),
         "empty folders", file("mine.py", OWN_MODEL.format("None"))),
    Case("own-wrong-return", "a function that returns no model", "--model_module {here}/mine.py:build", 2,
         ("must return a torch.nn.Module", "NoneType"), "empty folders", file("mine.py", OWN_MODEL.format("None"))),
    Case("own-small-table", "an own model with too few embeddings", "--model_module {here}/mine.py:build", 2,
         ("the model's embedding table has 100 rows", "len(tokenizer)"), "empty folders",
         file("mine.py", OWN_MODEL.format("nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))"))),
    Case("own-no-colon", "an own model without its function", "--model_module {here}/mine.py", 2,
         ("must be file.py:function",), "nothing", file("mine.py", OWN_MODEL.format("None"))),
    Case("own-syntax", "an own model that is not Python", "--model_module {here}/mine.py:build", 2,
         ("failed while loading", "SyntaxError", "line 1"), "empty folders", file("mine.py", "def build(:\n")),
    # --- checkpoints
    Case("resume-missing", "a checkpoint that is not there", "--resume_from_checkpoint {run}/step-00000200", 2,
         ("no such folder", "Did you mean step-00000002?")),
    Case("resume-file", "a file of a checkpoint", "--resume_from_checkpoint {run}/step-00000002/manifest.json", 2,
         ("is a file", "<run>/step-00000123")),
    Case("resume-run-folder", "the run's folder instead of a checkpoint", "--resume_from_checkpoint {run}", 1,
         ("use RUN/step-00000002",), "whole checkpoints"),
    Case("resume-truncated", "a shard cut short", "--resume_from_checkpoint {last}", 1,
         ("master-00001-of-00001.safetensors", "cut short", "Use RUN/step-00000001"),
         "whole checkpoints", truncated_shard),
    Case("resume-flipped", "one bit that changed", "--resume_from_checkpoint {last}", 1,
         ("exp_avg_sq-00001-of-00001.safetensors", "checksum is wrong", "resume_from_checkpoint auto"),
         "whole checkpoints", flipped_bit),
    Case("resume-no-manifest", "a checkpoint that was not finished",
         "--resume_from_checkpoint {last}", 1,
         ("no manifest.json", "not a complete checkpoint"), "whole checkpoints", missing_manifest),
    Case("resume-bad-manifest", "a damaged manifest", "--resume_from_checkpoint {last}", 1,
         ("manifest.json", "damaged"), "whole checkpoints", damaged_manifest),
    Case("resume-passes-over", "a damaged newest checkpoint",
         "--run_name done --max_steps 2 --resume_from_checkpoint auto", 0,
         ("passing over a damaged checkpoint", "cut short"), "the run", newest_damaged),
    Case("resume-all-damaged", "no checkpoint that is whole", "--run_name done --resume_from_checkpoint auto", 1,
         ("none of them is whole",), "whole checkpoints", all_damaged),
    Case("resume-nothing", "nothing to resume", "--resume_from_checkpoint auto --no_export", 0,
         ("has no checkpoint yet", "starts from the beginning"), "the run"),
    Case("resume-other-model", "a checkpoint of another model",
         "--preset tiny-moe --max_steps 2 --resume_from_checkpoint {run}/step-00000002", 1,
         ("parameters", "step-00000002"), "whole checkpoints"),
    Case("resume-other-seed", "a checkpoint made with other settings",
         "--seed 7 --max_steps 2 --resume_from_checkpoint {run}/step-00000002", 1,
         ("was made with seed 42, this run has 7",), "whole checkpoints"),
    Case("resume-longer", "a finished run, to go on for longer",
         "--max_steps 5 --resume_from_checkpoint {run}/step-00000002", 1,
         ("schedule total_steps 2, this run has 5", "--max_steps", "--continue_with_changes"), "whole checkpoints"),
    Case("resume-lora", "a full checkpoint, to go on with LoRA",
         "--lora_r 4 --max_steps 2 --resume_from_checkpoint {run}/step-00000002", 1, ("lora_r", "0", "4"),
         "whole checkpoints"),
    Case("resume-nvme-states", "a checkpoint whose optimizer states were on NVMe",
         "--max_steps 2 --resume_from_checkpoint {last}", 1,
         ("optimizer states on NVMe", "silently lose"), "whole checkpoints", weights_only),
    Case("run-name-in-use", "the name of a run that exists", "--run_name done", 2,
         ("run_name done is in use", "--resume_from_checkpoint auto"), "whole checkpoints", copied_run),
    # --- drives and folders
    Case("checkpoint-dir-file", "a file where the checkpoints should go", "--checkpoint_dir {here}/taken", 2,
         ("taken", "cannot be written", "--checkpoint_dir"), "nothing", file("taken", "x")),
    Case("checkpoint-dir-read-only", "checkpoints on a read-only drive", "--checkpoint_dir {here}/ro", 2,
         ("Read-only file system", "--checkpoint_dir"), "nothing", read_only("ro")),
    Case("log-dir-read-only", "logs on a read-only drive", "--log_dir {here}/ro", 2,
         ("Read-only file system", "--log_dir"), "empty folders", read_only("ro")),
    Case("checkpoint-drive-full", "no room for a checkpoint from the start", "--checkpoint_dir {here}/small", 1,
         ("nearly full", "reserve", "Nothing was loaded"), "no half file", small_drive("small", 40)),
    Case("export-drive-full", "no room for the finished model", "--export_dir {here}/small", 1,
         ("nearly full", "reserve", "Nothing was loaded"), "no half file", small_drive("small", 40)),
    Case("drive-fills-up", "another program fills the drive after step 2, with a checkpoint after each step",
         "--checkpoint_dir {here}/small --save_steps 1 --max_steps 9", 1,
         ("too full for a checkpoint", "Earlier checkpoints are intact", "--checkpoint_dir"),
         "resumable", filling_drive),
    Case("log-drive-no-byte", "a log drive without a free byte", "--log_dir {here}/small", 1,
         ("nearly full", "--log_dir", "Nothing was loaded"),
         "no half file", full_drive),
    Case("nvme-is-file", "a file as the NVMe folder", "--zero_stage infinity --nvme_offload_path {here}/nvme", 0,
         ("NVMe OFFLOAD IS NOT USED", "is a file", "Falling back to RAM"), "the run", file("nvme", "x")),
    Case("nvme-strict", "the same, where falling back is not wanted",
         "--zero_stage infinity --nvme_offload_path {here}/nvme --strict_offload", 2,
         ("strict_offload", "is a file"), "empty folders", file("nvme", "x")),
    Case("nvme-ram-disk", "a RAM disk as the NVMe folder",
         "--zero_stage infinity --nvme_offload_path {here}/ram --max_in_cpu_gb 0", 0,
         ("RAM disk", "WARNING", "saves no RAM"), "the run", ram_disk),
    Case("nvme-no-libaio", "DeepSpeed's own NVMe offload without libaio",
         "--zero_stage infinity --nvme_offload_path {here}/nvme --strict_offload --deepspeed_config {here}/ds.json", 2,
         ("libaio", "sudo apt install libaio-dev"), "empty folders", no_libaio),
    Case("nvme-full", "an NVMe drive without room",
         "--zero_stage infinity --nvme_offload_path {here}/ram --strict_offload", 2,
         ("must be free", "--nvme_offload_path"), "empty folders", small_drive("ram", 8)),
    Case("nvme-windows", "a Windows path as the NVMe folder",
         r"--zero_stage infinity --nvme_offload_path 'E:\nvme' --strict_offload", 2,
         ("Windows spelling", "/mnt/e/nvme"), "empty folders"),
    # --- the streaming engine
    Case("stream-hosts", "the streaming engine on two hosts", "--engine stream", 2,
         ("2 ranks on several hosts were started", "--engine deepspeed"), setup=no_gpu, program=TWO_HOSTS),
    Case("stream-stage-none", "the streaming engine without offload", "--engine stream --zero_stage none", 2,
         ("contradict each other", "--engine deepspeed")),
    Case("stream-stage-in-file", "the streaming engine, and ZeRO-1 in the file",
         "--engine stream --deepspeed_config {here}/ds.json", 2,
         ("engine stream and zero_stage zero1 contradict each other", "--engine deepspeed"),
         setup=ds_config(zero_optimization={"stage": 1})),
    Case("stream-encoder-decoder", "a model that cannot be streamed", "--engine stream --preset tiny-t5", 2,
         ("only decoder-only models are streamed", "--engine deepspeed"), "empty folders"),
    Case("stream-ram", "a model larger than RAM, and no drive", "--engine stream --preset llama-70b", 2,
         ("of RAM for parameters", "are available", "--nvme_offload_path DIR"), "empty folders"),
    Case("stream-budget", "a RAM budget that is too small, and no drive", "--engine stream --ram_budget_gib 0.001", 0,
         ("no drive takes the rest", "--nvme_offload_path DIR"), "the run"),
    Case("stream-folder-in-use", "the NVMe folder of a run that is under way",
         "--engine stream --nvme_offload_path {here}/nvme --ram_budget_gib 0", 1,
         ("DIR/nvme is in use by another process", "folder of its own"), "empty folders", nvme_in_use),
    Case("stream-activations", "activation checkpoints on a drive that is not named",
         "--engine stream --activations nvme", 2, ("--nvme_offload_path DIR",), "empty folders"),
    Case("stream-split-fp32", "split states, which need bf16, in fp32",
         "--engine stream --state_format split --precision fp32", 2, ("--precision bf16", "--state_format fp32")),
    Case("trace-deepspeed", "a timeline of DeepSpeed's engine", "--trace", 2,
         ("streaming engine only", "--engine stream"), "empty folders"),
    Case("tiling-deepspeed", "a setting that only the streaming engine has", "--tiling on", 2,
         ("tiling is a setting of the streaming engine",)),
    # --- the other programs
    Case("gds-flag", "an unknown flag", "--fast", 2, ("unrecognized arguments: --fast",), program="gds_optimizer.py"),
    Case("gds-path", "a folder that is not there", "--path {here}/nvme", 2, ("does not exist", "mkdir -p"),
         program="gds_optimizer.py"),
    Case("gds-config", "a damaged configuration", "--config {here}/ds.json", 2, ("not valid JSON", "line 2"),
         setup=file("ds.json", '{"outcore":\n'), program="gds_optimizer.py"),
    Case("cpu-tokens", "a number below zero", "generate gpt2 --prompt Hi --cpu_tokens -1", 1,
         ("cpu_tokens is -1", "at least 0"), program="outcore"),
    Case("setup-flag", "two flags that contradict each other", "--check --run", 2, ("--check only verifies",),
         program="setup.py"),
    Case("setup-set", "a set of packages that does not exist", "--set cuda11", 2, ("cuda11", "cuda12"),
         program="setup.py"),
]  # fmt: skip


# --- the table


def cell(case: Case, message: str) -> str:
    """The message as one table cell, abbreviated where nothing that matters is lost."""
    text = re.sub(r"\s+", " ", message).strip()
    if len(text) > LONGEST:
        cut = text[:LONGEST].rsplit(" ", 1)[0]
        if all(word in cut for word in case.words):
            text = cut + " …"
    return escaped(text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it stands."""
    for mark in ("\\", "|", "*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return text


def row_of(case: Case, outcome: Outcome) -> str:
    """One line of the table."""
    command = case.command.replace("|", "\\|")
    message = cell(case, outcome.message)
    return f"| {case.id} | {case.wrong} | `{command}` | {message} | {case.code} | {LEAVES[case.leaves][0]} |"


HEAD = """# Bad inputs, and what you read

Each line is something that people get wrong, what they typed, and what the program answers. Every line is a test:
`tests/test_bad_inputs.py` runs it, checks the exit code, the words and the files on disk, and that this table says the
same. Written by `python tests/bad_inputs.py --write`; `…` marks what is left out. DIR, DATA, MODEL, RUN and LAST stand
for folders: LAST is a copy of the newest checkpoint of RUN, which the case damages; DATA has a space in its name, so
every run here also shows that such paths work. The lines run with `--engine deepspeed` where they do not say otherwise;
configuration, data, model and checkpoints are read by the same code for both engines. Cases that mount a small or
read-only drive are skipped where mounting is not permitted.

Exit codes of `train_model.py`: 0 done, 1 the run failed, 2 wrong input, 128 + signal when stopped and saved.

| id | what is wrong | the command or setting | what you read | exit code | on the disk afterwards |
|---|---|---|---|---|---|
"""


def outcomes(ids: list[str]) -> dict[str, Outcome]:
    """The outcome of each case, in order."""
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="bad inputs ") as root:
        (Path(root) / "shared").mkdir()
        shared = Shared(Path(root) / "shared")
        for case in CASES:
            if ids and case.id not in ids:
                continue
            here = Path(root) / case.id
            here.mkdir()
            try:
                found[case.id] = run_case(case, here, shared)
            except NotHere as reason:
                sys.exit(f"{case.id}: {reason}: the table has to be written on a machine that can run every case")
            except AssertionError as problem:
                print(problem, file=sys.stderr)
                continue
            got = found[case.id]
            missing = [word for word in case.words if word not in got.message]
            if got.code != case.code or missing or "Traceback" in got.printed:
                del found[case.id]
                print(f"--- {case.id}: exit code {got.code} (wanted {case.code}), lacks {missing}\n{got.printed}",
                      file=sys.stderr)  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    """--write: run every case and write the table. --show ID ...: print what the program says."""
    if argv[:1] == ["--show"]:
        for id_, outcome in outcomes(argv[1:]).items():
            print(f"=== {id_}: exit code {outcome.code}\n{outcome.message}\n")
        return 0
    if argv != ["--write"]:
        print(__doc__)
        return 2
    found = outcomes([])
    missing = [case.id for case in CASES if case.id not in found]
    if missing:
        print(f"not written: {', '.join(missing)} did not go as expected", file=sys.stderr)
        return 1
    TABLE.write_text(HEAD + "".join(row_of(case, found[case.id]) + "\n" for case in CASES), encoding="utf-8")
    print(f"{len(found)} cases: {TABLE}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main(sys.argv[1:]))
