"""The address that a server listens at, and the host names that it accepts."""

import ipaddress
import socket


def listen(host: str, port: int) -> socket.socket:
    """Bind an address without accepting connections, so that an occupied one is detected before a model is loaded.

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
    """Return the host names that a server accepts; any if it listens to other machines and none was given.

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
