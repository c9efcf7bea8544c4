"""Addresses, ports and network interfaces of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the route to ``host``. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that carries an IPv4 address, None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == address), None)


def _address_of(interface: str, probe: socket.socket) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def gloo_interface(master_addr: str) -> str | None:
    """The interface Gloo has to be told, None where its own choice is right.

    Left to itself, Gloo listens on whatever the host's name resolves to; on many machines that is
    a loopback address which other nodes cannot reach.
    """
    address = address_towards(master_addr)
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except socket.gaierror:
        resolved = ""
    return None if resolved == address else interface_of(address)
