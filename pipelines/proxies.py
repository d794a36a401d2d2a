"""Keeps connections within this machine away from proxies; all others go on using them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LISTS = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
_EVERYTHING = "*"
"""In `no_proxy` it holds only where it stands alone. gRPC does not know it at all."""


def exceptions(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that except this machine from the proxies that an environment names.

    gRPC, which Beam's runner and its workers speak, sends even `localhost` to a proxy unless `no_grpc_proxy` or
    `no_proxy` says otherwise. They are set whether or not there is a proxy: a step may name one later.

    Args:
        environ: The environment.
    """
    plain = environ.get("no_proxy") or environ.get("NO_PROXY") or ""  # In this order, as most libraries look.
    lists = {"no_proxy": plain, "NO_PROXY": plain, "no_grpc_proxy": environ.get("no_grpc_proxy") or plain}
    return {
        name: text if text.strip() == _EVERYTHING and name != "no_grpc_proxy" else _with_loopback(text)
        for name, text in lists.items()
    }


def _with_loopback(text: str) -> str:
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    return ",".join([*names, *(name for name in _LOOPBACK if name not in names)])


def named_proxies(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables that name a proxy, for messages: their values may hold passwords."""
    return sorted(
        name for name, value in environ.items() if name.lower().endswith("_proxy") and value and not _is_list(name)
    )


def _is_list(name: str) -> bool:
    return name.lower().startswith("no_")


@contextlib.contextmanager
def direct_to_this_machine() -> Iterator[None]:
    """Excepts this machine from proxies while the context lives, for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in _LISTS}
    os.environ.update(exceptions(os.environ))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # A step may have taken it away already.
            else:
                os.environ[name] = value
