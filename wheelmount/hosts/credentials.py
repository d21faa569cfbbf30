"""Certificates by which a user's processes recognize each other on a network, and reject others.

Monarch uses TLS if it has a certificate, and then requires one of the same authority from every
caller, at every port that it opens.

Hosts that are started together have an authority of their own, which the process that started them
keeps: in memory, or with a session. It signs a certificate for the addresses of each, valid
for ``OF_HOSTS``. Hosts at ``tls://`` addresses, on which people start workers, belong to the user's
own authority, which is made on first use and lies in the user's state directory. Its key is
never sent.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
import re
import secrets
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wheelmount.config import Settings, private_directory
from wheelmount.errors import ConfigError, InputError
from wheelmount.hosts.address import Address
from wheelmount.lock import locked
from wheelmount.owned import make_folders
from wheelmount.variables import TLS

LIFETIME = datetime.timedelta(days=3650)
"""Of the user's own authority, and of what it signs for processes of this machine."""

OF_HOSTS = datetime.timedelta(days=30)
"""Of the authority of hosts that are started together, and of what it signs. No session lasts
longer: nothing renews certificates where hosts run."""

OF_WORKER = datetime.timedelta(days=90)
"""Of a certificate for a worker that people start."""

LEEWAY = datetime.timedelta(days=1)
"""How far the clocks of hosts may be behind."""

PEM = serialization.Encoding.PEM

Identity = Mapping[str, str]
"""What a process shows: text in PEM by ``TLS``."""

_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs a user's certificates.

    Attributes:
        certificate: by which others check them.
        key: secret; its holder may run programs on the user's hosts.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def of_user(cls, settings: Settings) -> Authority:
        """The user's own, made if there is none yet.

        Raises:
            ConfigError: its file is damaged, or others may read it.
            WaitError: another process has been making it for too long.
        """
        make_folders(Path(settings.state_dir))
        directory = private_directory(Path(settings.state_dir) / "credentials")
        file = directory / "authority.pem"
        with locked(directory / "lock", settings.start_timeout):
            if not file.exists():
                new = directory / f"new-{secrets.token_hex(4)}"
                new.touch(mode=0o600)
                new.write_bytes(cls.make().encode())
                new.rename(file)
        again = f"run: rm {file}; it is made again"
        text = read_secret(file, again)
        try:
            return cls.decode(text)
        except InputError as error:
            raise ConfigError(f"{file}: {error}", hint=again) from None

    @classmethod
    @functools.cache
    def of_process(cls) -> Authority:
        """That of the hosts that this process starts."""
        return cls.make(OF_HOSTS)

    @classmethod
    def make(cls, lifetime: datetime.timedelta = LIFETIME) -> Authority:
        """A new one, valid for a time."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder("wheelmount authority", key, lifetime)
        builder = builder.issuer_name(_name("wheelmount authority"))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    def public(self) -> str:
        """The certificate by which others check those that it signs, as PEM."""
        return self.certificate.public_bytes(PEM).decode()

    def encode(self) -> bytes:
        """As it is stored and sent: certificate and key, one after the other, as PEM."""
        return self.certificate.public_bytes(PEM) + _text(self.key)

    @classmethod
    def decode(cls, text: bytes) -> Authority:
        """Inverse of ``encode``.

        Raises:
            InputError: it is something else.
        """
        try:
            key = serialization.load_pem_private_key(text, None)
            certificate = x509.load_pem_x509_certificate(text)
        except ValueError:
            raise InputError("these are no credentials of wheelmount") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError("these are no credentials of wheelmount")
        return cls(certificate, key)

    def issue(
        self, names: Sequence[str], lifetime: datetime.timedelta = LIFETIME
    ) -> dict[str, str]:
        """A certificate for a process, as the variables by which Monarch takes it.

        Args:
            names: host names and IP addresses at which it is reached.
            lifetime: how long it is valid, if the authority is.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _builder("wheelmount", key, lifetime)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
            .add_extension(x509.ExtendedKeyUsage(uses), False)
            .sign(self.key, hashes.SHA256())
        )
        texts = self.certificate.public_bytes(PEM), signed.public_bytes(PEM), _text(key)
        return dict(zip(TLS, (text.decode() for text in texts), strict=True))


def encode(identity: Identity) -> bytes:
    """A certificate with its key and that of its authority, to be stored or sent, as PEM."""
    return "".join(identity[name] for name in TLS).encode()


def issue_for(address: Address, settings: Settings) -> bytes:
    """Credentials by the user's own authority for a worker elsewhere: see ``encode``."""
    return encode(Authority.of_user(settings).issue(address.names(), OF_WORKER))


def own_name(address: Address, authority: Authority, timeout: float) -> str | None:
    """Return what a worker calls its own host: the first name in its certificate.

    Args:
        address: where it is reached.
        authority: of its certificate.
        timeout: seconds in which it has to show it.

    Returns:
        None if nothing there shows a certificate of the authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the name is what is asked for
    context.load_verify_locations(cadata=authority.public())
    try:
        # Without a certificate of this side: the other's comes before, and the name is no secret.
        with (
            socket.create_connection((address.host, address.port), timeout) as plain,
            context.wrap_socket(plain) as secured,
        ):
            shown = secured.getpeercert(binary_form=True)
    except OSError:
        return None
    kind = x509.SubjectAlternativeName
    try:
        names = x509.load_der_x509_certificate(shown or b"").extensions.get_extension_for_class(
            kind
        )
    except (ValueError, x509.ExtensionNotFound):
        return None
    return next((str(name.value) for name in names.value), None)


def read_secret(file: Path, hint: str) -> bytes:
    """Read credentials that are secret.

    Args:
        file: the file.
        hint: what to do if they are not.

    Raises:
        ConfigError: others may read the file, or another user may have written it.
    """
    with file.open("rb") as opened:
        found = os.fstat(opened.fileno())
        if found.st_mode & 0o077:
            raise ConfigError(f"others may read {file}", hint=hint)
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{file} belongs to another user", hint=hint)
        return opened.read()


def decode(text: bytes, names: Sequence[str]) -> Identity:
    """What a process shows that was given credentials.

    Args:
        text: of ``encode``; or of ``Authority.encode``, of hosts that all have their authority.
        names: host names and IP addresses at which the process is reached, for the second.

    Raises:
        InputError: it is something else.
    """
    blocks = [match[0].decode() for match in _BLOCK.finditer(text)]
    if len(blocks) == len(TLS):
        return dict(zip(TLS, blocks, strict=True))
    return Authority.decode(text).issue(names)


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LEEWAY)
        .not_valid_after(now + lifetime)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
