"""JSON that clients send, field by field: each is taken with a check of its type, and what nobody takes is refused."""

from __future__ import annotations

import json
import reprlib
from typing import Any

MAX_MESSAGE = 500  # characters


class ApiError(Exception):
    """A request that is refused, in the protocol's form."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_document(body: bytes) -> Any:
    """Returns the JSON of a body; raises `ApiError` if it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error
    except ValueError as error:  # not UTF-8 either, or a number of thousands of digits
        raise ApiError(f"the body is no JSON: {error}") from error


class Fields:
    """The fields of a JSON object, each of which is taken once; null is as if it were left out, whatever the field."""

    def __init__(self, document: Any, where: str = ""):
        if not isinstance(document, dict):
            raise ApiError(f"{where or 'the body'} must be a JSON object; got {show(document)}", param=where or None)
        # Clients send back what they were sent, such as the refusal of an answer, which is null.
        self._left, self._where = {name: value for name, value in document.items() if value is not None}, where

    def peek(self, name: str) -> Any:
        return self._left.get(name)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def refuse(self, name: str, value: Any, wanted: str) -> None:
        name = f"{self._where}.{name}" if self._where else name
        raise ApiError(f"{name} must be {wanted}; got {show(value)}", param=name)

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            self.refuse(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            self.refuse(name, value, f"a number from {least:g} to {most:g}")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not is_text(value):
            self.refuse(name, value, "a text of valid Unicode")
        return value

    def end(self) -> None:
        """Refuses what nobody has taken."""
        for name in self._left:
            name = f"{self._where}.{name}" if self._where else name
            raise ApiError(f"unknown field {show(name)}: leave it out", param=name[:MAX_MESSAGE])


def is_text(value: Any) -> bool:
    """Returns whether it is a text of valid Unicode: JSON can write half a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def show(value: Any) -> str:
    return reprlib.repr(value)
