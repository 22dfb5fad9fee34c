"""A token where others can reach the panels.

A browser signs in once (`/?token=...`, or the form that a stranger is shown) and then has a cookie; programs send
`Authorization: Bearer TOKEN`. Pages get a content security policy under which a browser asks this server and no other.
"""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outcore.serve.additions import OPEN_PATHS, ApiError, Keys, bearer_of, read_bytes, refusal

COOKIE = "outcore_ui"
SIGN_IN = "/sign_in"
MAX_FORM_BYTES = 4096
POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
# with no-referrer a browser would send the sign-in form with "Origin: null", as pages of other sites may
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>outcore: sign in</title><style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui,sans-serif;
max-width:26rem;margin:15vh auto;padding:0 1rem}}
input,button{{font:inherit;padding:.5rem;width:100%;box-sizing:border-box;margin:.3rem 0}}p.bad{{color:#c22}}</style>
<h1>outcore</h1>{words}<form method="post" action="/sign_in">
<label>Token<input name="token" type="password" autofocus autocomplete="current-password"></label>
<button>Sign in</button></form><p>The token is in the file that was given as --token_file.</p></html>"""


class SignIn:
    """ASGI middleware around everything behind the guard."""

    def __init__(self, app: ASGIApp, tokens: Sequence[str]) -> None:
        self.app, self._keys = app, Keys(tokens, "token", "invalid_token") if tokens else None
        self._cookies = [_cookie(token.encode()).encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = None if self._keys is None else await self._asked(Request(scope, receive), self._keys)
        await (answer or self.app)(scope, receive, _with_headers(send))

    async def _asked(self, request: Request, keys: Keys) -> Response | None:
        """The answer to whoever signs in, or may not come in yet; None for one who may."""
        try:
            token = await self._shown(request)
            if token is not None:
                return await self._signed_in(request, keys, token.strip().encode())
            if request.url.path in OPEN_PATHS or self._has_cookie(request):
                return None
            cookie = request.cookies.get(COOKIE, "").encode()  # a wrong one is a guess like a wrong token
            await keys.check(bearer_of(request.scope) or cookie, request.scope)
            return None
        except ApiError as error:
            if "text/html" in request.headers.get("accept", "") and request.method == "GET":
                return HTMLResponse(_page(), error.status)
            return refusal(error, request.scope)

    async def _shown(self, request: Request) -> str | None:
        """The token that a browser shows to sign in."""
        path, query = request.url.path, request.query_params
        if path == SIGN_IN and request.method == "POST":
            body = await read_bytes(request, MAX_FORM_BYTES)
            return parse_qs(body.decode("utf-8", errors="replace")).get("token", [""])[0]
        return query.get("token") if path == "/" else None

    async def _signed_in(self, request: Request, keys: Keys, token: bytes) -> Response:
        try:
            await keys.check(token, request.scope)
        except ApiError as error:
            words = "It is a line of the file that was given as --token_file."
            return HTMLResponse(_page(f"{error.message.replace('missing or wrong', 'wrong')} {words}"), error.status)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, _cookie(token), httponly=True, samesite="strict", max_age=30 * 86400)
        return answer

    def _has_cookie(self, request: Request) -> bool:
        given = request.cookies.get(COOKIE, "").encode()
        right = [hmac.compare_digest(given, cookie) for cookie in self._cookies]  # all of them: the time tells nothing
        return any(right)


def _cookie(token: bytes) -> str:
    """Make the value that a browser keeps in place of the token itself."""
    return hmac.new(token, b"outcore ui", hashlib.sha256).hexdigest()


def _page(problem: str = "") -> str:
    return _PAGE.format(words=f'<p class="bad" role="alert">{html.escape(problem)}</p>' if problem else "")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
