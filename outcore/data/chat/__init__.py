"""Chat templates: conversations to tokens, with what the assistant wrote marked."""

from __future__ import annotations

from outcore.data.chat.encoder import ChatEncoder, default_template, ensure_chat_template

__all__ = ["ChatEncoder", "default_template", "ensure_chat_template"]
