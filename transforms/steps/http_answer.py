"""What a successful answer has to be: not empty, and no page of HTML that nobody asked for. No Beam here.

Logins, proxies and maintenance pages answer 200 as well. As a record, such a page would be written without a word.
"""

from __future__ import annotations

import dataclasses
import re

import httpx

_PAGE_TYPES = {"text/html", "application/xhtml+xml"}
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_LOOKED_AT_BYTES = 2000
"""A page says within this that it is one."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What answers have to be.

    Attributes:
        allow_empty: Whether they may be empty.
        types: Content types that they may have, such as application/json or image/*; None for all but pages of HTML
            where the call neither sends nor accepts HTML.
    """

    allow_empty: bool = False
    types: tuple[str, ...] | None = None

    def refuse(self, response: httpx.Response) -> tuple[str, str] | None:
        """Returns the reason and the words why an answer cannot be used, None if it can.

        Args:
            response: A successful answer, its body read.
        """
        if not response.content:
            return None if self.allow_empty else ("empty_answer", "no content")
        found = _content_type(response.headers)
        if self.types is not None:
            if any(_fits(found, wanted) for wanted in self.types):
                return None
            return "unexpected_content", f"{found or 'no content type'} instead of {' or '.join(self.types)}"
        if _is_page(response, found) and not _is_about_pages(response.request.headers):
            return "unexpected_content", "a page of HTML"
        return None


def _content_type(headers: httpx.Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _fits(found: str, wanted: str) -> bool:
    kind, _, name = wanted.partition("/")
    return wanted in (found, "*/*") or (name == "*" and found.startswith(f"{kind}/"))


def _is_page(response: httpx.Response, found: str) -> bool:
    """Whether an answer is a page of HTML: by its type, or by its content where the type says little."""
    if found in _PAGE_TYPES:
        return True
    is_vague = not found or found == "text/plain"
    return is_vague and _PAGE.match(response.content[:_LOOKED_AT_BYTES]) is not None


def _is_about_pages(headers: httpx.Headers) -> bool:
    """Whether a call sends HTML, or says that it accepts it."""
    asked = headers.get("accept", "") + "," + headers.get("content-type", "")
    return any(name in asked.lower() for name in _PAGE_TYPES)
