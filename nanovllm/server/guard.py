"""What is settled before a request is read: who may ask, and how much a body may hold."""

from secrets import compare_digest

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError, error_response


class Guard:
    """401 for `/v1/...` without the key, 413 for a body of more than `max_body_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.api_key = None if api_key is None else api_key.encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        too_large = ApiError(413, f"the body has more than {self.max_body_bytes} bytes", code="body_too_large")
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise too_large
            return message

        if not self._may_ask(scope["path"], headers.get(b"authorization", b"")):
            message = "no or a wrong API key; send 'Authorization: Bearer KEY'"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)
        elif int(headers.get(b"content-length", b"0")) > self.max_body_bytes:
            await error_response(too_large)(scope, receive, send)
        else:
            await self.app(scope, counted, send)

    def _may_ask(self, path: str, authorization: bytes) -> bool:
        if self.api_key is None or not path.startswith("/v1"):
            return True
        scheme, _, key = authorization.partition(b" ")  # its case does not matter: RFC 9110
        return scheme.lower() == b"bearer" and compare_digest(key.strip(), self.api_key)
