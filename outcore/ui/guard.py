"""Who may come in: a token where others can reach the panels, and never a page of another site.

A browser signs in once (`/?token=...`, or the form that a stranger is shown) and then has a cookie; programs send
`Authorization: Bearer TOKEN`. Pages get a content security policy under which a browser asks this server and no other.
"""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outcore.serve import is_loopback
from outcore.serve.additions import ApiError

COOKIE = "outcore_ui"
SIGN_IN = "/sign_in"
OPEN_PATHS = frozenset({"/health", SIGN_IN})
MAX_FORM_BYTES = 4096
POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>outcore: sign in</title><style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui,sans-serif;
max-width:26rem;margin:15vh auto;padding:0 1rem}}
input,button{{font:inherit;padding:.5rem;width:100%;box-sizing:border-box;margin:.3rem 0}}p.bad{{color:#c22}}</style>
<h1>outcore</h1>{words}<form method="post" action="/sign_in">
<label>Token<input name="token" type="password" autofocus autocomplete="current-password"></label>
<button>Sign in</button></form><p>The token is in the file that was given as --token_file.</p></html>"""


class Guard:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, tokens: Sequence[str], host: str) -> None:
        self.app = app
        self._tokens = [token.encode() for token in tokens]
        self._is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, receive)
        answer = self._refusal(request.headers) or await self._signing_in(request)
        if answer is None and self._tokens and request.url.path not in OPEN_PATHS and not self._is_known(request):
            answer = self._stranger(request)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        await self.app(scope, receive, _with_headers(send))

    def _refusal(self, headers: Headers) -> Response | None:
        """403 for a page of another site, or a name that another site gave to this machine (DNS rebinding)."""
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if self._is_local and not is_loopback(name):
            return _told(ApiError(403, f"This server is for this machine alone, and {name!r} is not its name."))
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return _told(ApiError(403, "A page of another site may not ask this server."))
        return None

    async def _signing_in(self, request: Request) -> Response | None:
        if not self._tokens:
            return None
        if request.url.path == SIGN_IN and request.method == "POST":
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    return _told(ApiError(413, "That is no token."))
            token = parse_qs(body.decode("utf-8", errors="replace")).get("token", [""])[0]
            return self._signed_in(token)
        if request.url.path == "/" and "token" in request.query_params:
            return self._signed_in(request.query_params["token"])
        return None

    def _signed_in(self, token: str) -> Response:
        if not self._is_right(token.strip().encode(), self._tokens):
            return HTMLResponse(
                _page("The token is wrong. It is a line of the file that was given as --token_file."), 401
            )
        answer = RedirectResponse("/", 303)
        kept = _cookie(token.strip().encode())
        answer.set_cookie(COOKIE, kept, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer

    def _is_known(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        cookie = request.cookies.get(COOKIE, "").encode()
        by_bearer = self._is_right(bearer, self._tokens)
        return self._is_right(cookie, [_cookie(token).encode() for token in self._tokens]) or by_bearer

    def _is_right(self, given: bytes, known: Sequence[bytes]) -> bool:
        right = [hmac.compare_digest(given, one) for one in known]  # all of them: the time tells nothing
        return any(right)

    def _stranger(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", "") and request.method == "GET":
            return HTMLResponse(_page(), 401)
        return _told(ApiError(401, "The token is missing or wrong.", code="invalid_token"))


def _cookie(token: bytes) -> str:
    """What a browser keeps in place of the token itself."""
    return hmac.new(token, b"outcore ui", hashlib.sha256).hexdigest()


def _page(problem: str = "") -> str:
    return _PAGE.format(words=f'<p class="bad" role="alert">{html.escape(problem)}</p>' if problem else "")


def _told(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
