"""Proxy variables that would capture the rollouts' calls to this machine.

The pinned client is ``requests``, which obeys them for loopback as well: the calls then go to the
proxy, and its answers become rollout text. The rules here are those of ``requests`` for one
plain http address; a test holds them to it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from smartsearch_sidecar.doctor.findings import Finding, error, ok


def check_proxies(environ: Mapping[str, str], host: str, port: int) -> Finding:
    """Whether a client with this environment reaches ``http://host:port`` itself."""
    name = "proxy variables"
    captured = capturing(environ, host, port)
    if captured is None:
        return ok(name, f"a client with this environment reaches {host} directly")
    return error(
        name,
        f"{captured} is set and nothing exempts {host}: rollouts would call the proxy instead",
        f"where the trainer is started: {export_line(environ, host)}",
    )


def capturing(environ: Mapping[str, str], host: str, port: int) -> str | None:
    """The variable that sends calls to ``http://host:port`` to a proxy, if one does."""
    if _exempt(environ.get("no_proxy") or environ.get("NO_PROXY") or "", host, port):
        return None
    for wanted in ("http_proxy", "all_proxy"):
        # The lower-case one wins where both are set, even if it is empty.
        name = wanted if wanted in environ else wanted.upper()
        if environ.get(name):
            return name
    return None


def export_line(environ: Mapping[str, str], host: str) -> str:
    """The line to run before the trainer: it keeps present exemptions, and sets both spellings."""
    before = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [name.strip() for name in before.split(",") if name.strip()]
    names += [name for name in dict.fromkeys((host, "127.0.0.1", "localhost")) if name not in names]
    value = ",".join(names)
    return f"export NO_PROXY={value} no_proxy={value}"


def _exempt(no_proxy: str, host: str, port: int) -> bool:
    if no_proxy.strip() == "*":  # in a list of names, an asterisk means nothing
        return True
    names = [name.strip().lstrip(".").lower() for name in no_proxy.split(",") if name.strip()]
    if any(_ends(host.lower(), name) for name in names):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return any(_ends(f"{host}:{port}", name) for name in names)
    return any(_covers(name, host) for name in names)


def _ends(host: str, name: str) -> bool:
    return host == name or host.endswith(f".{name}")


def _covers(name: str, address: str) -> bool:
    """Whether ``name`` is a network that holds the address."""
    try:
        return "/" in name and ipaddress.ip_address(address) in ipaddress.ip_network(name, False)
    except ValueError:
        return False
