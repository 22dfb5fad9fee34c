"""Flags of the `outcore` commands, without torch: a mistyped one is refused before seconds of imports."""

from outcore.config.commands.check import check_flags
from outcore.config.commands.evaluating import HISTORY, evaluate_flags, evaluations_flags, lists_tasks
from outcore.config.commands.files import (
    GGUF_KINDS,
    data_flags,
    export_flags,
    models_flags,
    runs_flags,
    verify_flags,
    watch_flags,
)
from outcore.config.commands.running import SAMPLING_FLAGS, chat_flags, generate_flags, score_flags
from outcore.config.commands.serving import DEFAULT_UI_PORT, serve_flags, start_flags, ui_flags
