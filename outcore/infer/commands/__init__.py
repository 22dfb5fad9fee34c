"""Commands: generate, chat, score. Each file has `main(argv) -> int`; flags are in `outcore.config.commands`."""

from outcore.infer.commands.job import AHEAD
from outcore.infer.commands.journal import JobError, Journal
from outcore.infer.commands.lines import (
    Line,
    batch_body,
    body_of,
    failure_of,
    numbered,
    read_line,
    result_of,
    understand,
)
from outcore.infer.commands.logprobs import CompletionLogprobs, of_chat, text_of
from outcore.infer.commands.options import sampling_from, settings_of
from outcore.infer.commands.score import groups_of, scored_tokens
