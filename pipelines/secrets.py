"""Credentials must not stand in a config: it is copied to the output directory, and into plan, graph and report.

They are refused rather than masked, because a job that goes on or is replayed runs with the config that was kept. The
name of an environment variable may stand there: `${NAME}`.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

_PARAMETERS = re.compile(
    r"(proxy_)?authorization|(x_)?(api|access|secret|private)_?key|(aws_|s3_)?(secret_access_key|access_key_id)"
    r"|((access|api|auth|bearer|id|refresh|s3_session|session)_?)?token|(client_)?secret|passw(or)?d|passphrase"
    r"|(set_)?cookie|\w*connection_string"
)
"""Names that say what the value is, wherever they stand; not `eos_token`, `token_column` or `max_tokens`."""

_WORDS = {"apikey", "auth", "authorization", "cookie", "credential", "credentials", "key", "passwd", "password"}
_WORDS |= {"secret", "sig", "signature", "token"}
"""Words of which one in the name of a header, of a variable or of a parameter in a URL is enough."""

_LOOSE_GROUPS = ("headers", "env")
_USER_AND_PASSWORD = re.compile(r"://[^/?#@\s]*:(?P<password>[^/?#@\s]+)@")


def find_secrets(config: dict[str, Any]) -> Iterator[str]:
    """Yields the key path of each value of a config that looks like a credential.

    Args:
        config: Keys and values, nested.
    """
    yield from _walk(config, "", loose=False)


def _walk(value: Any, path: str, *, loose: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            where = f"{path}.{key}" if path else str(key)
            if isinstance(inner, str) and _is_literal(inner) and _is_secret_name(str(key), loose=loose):
                yield where
            else:
                yield from _walk(inner, where, loose=loose or key in _LOOSE_GROUPS)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{number}]", loose=loose)
    elif isinstance(value, str) and _has_secret_in_url(value):
        yield path


def _is_literal(text: str) -> bool:
    return bool(text.strip()) and "${" not in text


def _is_secret_name(name: str, *, loose: bool) -> bool:
    plain = name.strip().lower().replace("-", "_")
    return _PARAMETERS.fullmatch(plain) is not None or (loose and not _WORDS.isdisjoint(plain.split("_")))


def _has_secret_in_url(text: str) -> bool:
    found = _USER_AND_PASSWORD.search(text)
    if found is not None and _is_literal(found["password"]):
        return True
    if not text.startswith(("http://", "https://")):
        return False
    query = text.partition("?")[2].partition("#")[0]
    pairs = urllib.parse.parse_qsl(query)
    return any(_is_literal(value) and _is_secret_name(name, loose=True) for name, value in pairs)
