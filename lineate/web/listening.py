"""Where a server listens, and the names by which it may be called."""

import ipaddress
import socket


def listen(host: str, port: int) -> socket.socket:
    """Take an address, so that one that is taken is noticed before a model is loaded; clients cannot connect yet.

    Args:
        host: A name or an address of this machine.
        port: The port; 0 takes a free one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"--host must be a name or an address of this machine, got {host!r} ({error.strerror})"
        ) from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(f"--host and --port must be free, got {host}:{port} ({error.strerror})") from None
    return made


def allowed_hosts(host: str, more: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the names by which a server may be called; any if it listens to other machines and none was named.

    Args:
        host: The name or address that the server listens at.
        more: Names that are allowed as well.
    """
    named = {name.lower() for name in more}
    if is_local(host):
        return frozenset({"localhost", "127.0.0.1", "::1", host.lower(), *named})
    return frozenset({host.lower(), *named} if named else ())


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach an address.

    Args:
        host: A name or an address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
