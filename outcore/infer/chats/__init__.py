"""Conversations: messages and tools as the model reads them, and the parts of its answers told apart."""

from outcore.infer.chats.chat import CHAT_FIELDS, Chat, ChatError, request_of
from outcore.infer.chats.parsing import AnswerParser, Parsed, Reads, TemplateParser
from outcore.infer.chats.style import CallStyle, Pairs, style_of
