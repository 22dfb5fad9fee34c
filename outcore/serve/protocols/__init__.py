"""Conversations over HTTP in three clients' languages: OpenAI's Chat and Responses, Anthropic's Messages.

Each is a thin translation to one form: a request becomes a `ChatCall`, its answer is told in `Parsed`."""

from outcore.serve.protocols import chat as _chat
from outcore.serve.protocols import messages as _messages
from outcore.serve.protocols import responses as _responses
from outcore.serve.protocols.messages import counted as count_tokens

PROTOCOLS = (
    (_chat.ENDPOINT, _chat.ChatCall, _chat.whole, _chat.events),
    (_responses.ENDPOINT, _responses.ResponseCall, _responses.whole, _responses.events),
    (_messages.ENDPOINT, _messages.MessagesCall, _messages.whole, _messages.events),
)
"""Path, what understands a request, the whole answer to it, its events."""
