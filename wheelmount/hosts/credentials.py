"""Certificates by which a user's own processes know each other on a network, and nobody else.

Monarch speaks TLS where it is given a certificate, and then asks for one of the same authority
from whoever connects, at every port that it opens. The authority is made on first use and lies in
the user's state directory; hosts with the same home directory find it there, others are sent it
over what starts them. Each process makes a certificate of its own for the addresses it listens at.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from filelock import FileLock

from wheelmount.config import Settings, private_directory
from wheelmount.errors import ConfigError, InputError

LIFETIME = datetime.timedelta(days=3650)
"""Of the authority and of what it signs: a session may last, and whoever has the key can renew."""

LEEWAY = datetime.timedelta(days=1)
"""How far the clocks of hosts may be behind."""

PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs a user's certificates.

    Attributes:
        certificate: by which others check them.
        key: secret; whoever has it may run programs on the user's hosts.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def of_user(cls, settings: Settings) -> Authority:
        """The user's own, made if there is none yet.

        Raises:
            ConfigError: its file is damaged, or others may read it.
        """
        Path(settings.state_dir).mkdir(parents=True, exist_ok=True)
        directory = private_directory(Path(settings.state_dir) / "credentials")
        file = directory / "authority.pem"
        with FileLock(directory / "lock", mode=0o600, timeout=settings.start_timeout):
            if not file.exists():
                new = directory / f"new-{secrets.token_hex(4)}"
                new.touch(mode=0o600)
                new.write_bytes(cls.make().encode())
                new.rename(file)
        again = f"run: rm {file}; it is made again"
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {file}", hint=again)
        try:
            return cls.decode(file.read_bytes())
        except InputError as error:
            raise ConfigError(f"{file}: {error}", hint=again) from None

    @classmethod
    def make(cls) -> Authority:
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder("wheelmount authority", key).issuer_name(_name("wheelmount authority"))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        return cls(builder.sign(key, hashes.SHA256()), key)

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

    def issue(self, names: Sequence[str]) -> dict[str, str]:
        """A certificate for a process, as the variables by which Monarch takes it.

        Args:
            names: host names and IP addresses at which it is reached.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _builder("wheelmount", key)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
            .add_extension(x509.ExtendedKeyUsage(uses), False)
            .sign(self.key, hashes.SHA256())
        )
        return {
            "HYPERACTOR_TLS_CA": self.certificate.public_bytes(PEM).decode(),
            "HYPERACTOR_TLS_CERT": signed.public_bytes(PEM).decode(),
            "HYPERACTOR_TLS_KEY": _text(key).decode(),
        }


def _builder(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LEEWAY)
        .not_valid_after(now + LIFETIME)
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
