"""TLS of servers and of links between our services, from files that are read again when they change.

Must not know: which services talk, settings.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from service_runtime.reloaded import Reloaded
from service_runtime.tls_files import LinkTlsFiles, ServerTlsFiles


class BadTls(Exception):
    """The files cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _ServerMaterial:
    context: ssl.SSLContext
    grpc_config: grpc.ServerCertificateConfiguration


class ServerTls:
    """A server's identity, for gRPC and HTTP: each new connection gets what the files hold then. TLS 1.2 at least."""

    def __init__(self, files: ServerTlsFiles) -> None:
        """Raises BadTls."""
        self._is_mutual = files.client_ca is not None
        self._material = Reloaded("tls", files.paths, lambda: _server_material(files), BadTls)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one port: gRPC keeps in them what it was given last."""
        given = [self._material.current()]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads at each handshake; None: nothing has changed."""
            material = self._material.current()
            if material is given[0]:
                return None
            given[0] = material
            return material.grpc_config

        # The stubs do not know that the fetcher may say "unchanged".
        return grpc.dynamic_ssl_server_credentials(given[0].grpc_config, fetch, self._is_mutual)  # type: ignore[arg-type]

    def ssl_context(self) -> ssl.SSLContext:
        """One context for the life of a server; its handshakes use the certificates of their moment."""
        context = self._material.current().context

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._material.current().context

        context.sni_callback = choose
        return context


class LinkTls:
    """The client side of a link: credentials that stay the same object until the files change."""

    def __init__(self, files: LinkTlsFiles) -> None:
        """Raises BadTls."""
        self._material = Reloaded("tls", files.paths, lambda: _link_credentials(files), BadTls)
        name = files.server_name
        self.options: tuple[tuple[str, str], ...] = () if name is None else (("grpc.ssl_target_name_override", name),)

    def credentials(self) -> grpc.ChannelCredentials:
        return self._material.current()


class Dialer:
    """Opens channels, encrypted or, without `tls`, not. A channel keeps the credentials that it was opened with."""

    def __init__(self, options: Sequence[tuple[str, int]], tls: LinkTls | None = None) -> None:
        self._options = options
        self._tls = tls

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What to open a channel with now; another object than before: it should be opened anew."""
        return None if self._tls is None else self._tls.credentials()

    def open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if self._tls is None or credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, credentials, options=[*self._options, *self._tls.options])


def _server_material(files: ServerTlsFiles) -> _ServerMaterial:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_identity(context, files.certificate, files.key)
    if files.client_ca is not None:
        _load_ca(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed connection would not be checked against a CA that has changed since.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    pair = _read(files.key), _read(files.certificate)
    client_ca = None if files.client_ca is None else _read(files.client_ca)
    return _ServerMaterial(context, grpc.ssl_server_certificate_configuration([pair], client_ca))


def _link_credentials(files: LinkTlsFiles) -> grpc.ChannelCredentials:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_ca(context, files.ca)
    if files.identity is None:
        return grpc.ssl_channel_credentials(_read(files.ca))
    certificate, key = files.identity
    _load_identity(context, certificate, key)
    return grpc.ssl_channel_credentials(_read(files.ca), _read(key), _read(certificate))


def _load_identity(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _read(certificate), _read(key)

    def refuse_password() -> NoReturn:
        raise BadTls(f"the key in {key} is encrypted: a service cannot ask for its password")

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadTls(f"the key in {key} does not belong to the certificate in {certificate}") from error
        raise BadTls(f"{certificate} and {key} do not hold a certificate and its key in PEM format") from error


def _load_ca(context: ssl.SSLContext, file: Path) -> None:
    _read(file)
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise BadTls(f"{file} does not hold certificates in PEM format") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadTls(f"{file} cannot be read: {error.strerror}") from error
