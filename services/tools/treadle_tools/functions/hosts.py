"""Which hosts functions may be called at: those named in the settings, and no other.

`example.org` allows that host at any port, `example.org:8080` at that one, `*.svc.cluster.local` every host below.
"""

from urllib.parse import urlsplit


class HostRefused(Exception):  # noqa: N818 - the finding, as callers speak of it
    """The URL's host is not among those allowed; the message says which setting would allow it."""


def check_host(url: str, allowed: tuple[str, ...]) -> None:
    """Raises HostRefused."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not any(_allows(rule, host, port) for rule in allowed):
        raise HostRefused(f"host {host!r} of {url!r} is not allowed: name it in TREADLE_TOOLS_FUNCTION_HOSTS")


def _allows(rule: str, host: str, port: int) -> bool:
    name, colon, wanted = rule.rpartition(":")
    if colon and wanted.isdigit():
        return _matches(name, host) and int(wanted) == port
    return _matches(rule, host)


def _matches(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:]) and len(host) > len(name) - 1
    return host == name.strip("[]").lower()
