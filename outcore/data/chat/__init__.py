"""Chat templates: conversations to tokens, with what the assistant wrote marked."""

from outcore.data.chat.default import default_template, end_tokens_of, ensure_chat_template, read_template
from outcore.data.chat.encoder import ChatEncoder, Encoded
