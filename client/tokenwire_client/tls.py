"""Encrypted connections: which files, and what gRPC makes of them.

Must not know: requests, clients.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

from tokenwire_client.channels import CHANNEL_OPTIONS
from tokenwire_client.errors import invalid

File = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files, read whenever a connection is opened. `Tls()`: a server whose certificate everybody knows.

    `ca_file`: who signs the server's certificate. `cert_file` and `key_file`: our own certificate, for servers that
    want one (mTLS). `server_name`: what the server's certificate is for, when it is not the host that is called.
    """

    ca_file: File | None = None
    cert_file: File | None = None
    key_file: File | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise invalid("tls", "cert_file and key_file go together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidRequest for a file that cannot be read."""
        return grpc.ssl_channel_credentials(
            _content("tls.ca_file", self.ca_file),
            _content("tls.key_file", self.key_file),
            _content("tls.cert_file", self.cert_file),
        )

    def options(self) -> tuple[tuple[str, str], ...]:
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)


def blocking_channel(target: str, tls: Tls | None) -> grpc.Channel:
    """One connection, plaintext without `tls`. Raises InvalidRequest for a file that cannot be read."""
    if tls is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, tls.credentials(), options=(*CHANNEL_OPTIONS, *tls.options()))


def _content(field: str, file: File | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise invalid(field, f"cannot be read: {error.strerror}") from error
