"""Which files hold the certificates and keys of a server or of a link.

Must not know: gRPC, what is in the files.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerTlsFiles:
    """PEM files. With `client_ca` only clients with a certificate of it are let in (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key) if self.client_ca is None else (self.certificate, self.key, self.client_ca)


@dataclass(frozen=True, slots=True)
class LinkTlsFiles:
    """PEM files of a link's client side. `identity`: our own certificate and its key, for mTLS.

    `server_name`: what the server's certificate must be for; None: the host that is called.
    """

    ca: Path
    identity: tuple[Path, Path] | None = None
    server_name: str | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.ca, *(self.identity or ()))


def server_files(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerTlsFiles | None:
    """From settings; None is plaintext. Raises ValueError for a combination that makes no sense."""
    if certificate is not None and key is not None:
        return ServerTlsFiles(certificate, key, client_ca)
    if (certificate, key, client_ca) != (None, None, None):
        raise ValueError("--tls-cert-file and --tls-key-file go together; --tls-client-ca-file needs both")
    return None


def link_files(
    ca: Path | None, certificate: Path | None, key: Path | None, server_name: str | None
) -> LinkTlsFiles | None:
    """The same for `--engine-...-file`, where TLS begins with the CA."""
    if (certificate is None) != (key is None):
        raise ValueError("--engine-cert-file and --engine-key-file go together")
    if ca is None:
        if certificate is not None or server_name is not None:
            raise ValueError("--engine-cert-file, --engine-key-file and --engine-server-name need --engine-ca-file")
        return None
    return LinkTlsFiles(ca, None if certificate is None or key is None else (certificate, key), server_name)
