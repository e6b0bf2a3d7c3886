"""Authorities and certificates for tests, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
LOOPBACK = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: str
    key: str

    def replace_by(self, other: Pair) -> None:
        """Its files hold what the other's do, from one moment to the next."""
        for mine, theirs in ((self.cert, other.cert), (self.key, other.key)):
            fresh = Path(f"{mine}.fresh")
            fresh.write_bytes(Path(theirs).read_bytes())
            fresh.rename(mine)


class Authority:
    """Signs what it is asked to. `ca` is its own certificate's file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._number = folder / name, 0
        self._folder.mkdir(parents=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key.public_key(), NOW + 10 * DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.ca = self._write("ca.pem", own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certify(
        self,
        *names: str,
        until: datetime.datetime = NOW + 5 * DAY,
        common_name: str = "",
        others: Sequence[x509.GeneralName] = (),
    ) -> Pair:
        """For loopback and these DNS names. common_name: empty for the first of them. others: names of other kinds."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._number += 1
        common_name = common_name or (names[0] if names else "nobody")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        alternatives = x509.SubjectAlternativeName([*LOOPBACK, *map(x509.DNSName, names), *others])
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = self._builder(subject, key.public_key(), until)
        signed = builder.add_extension(alternatives, critical=False).add_extension(uses, critical=False)
        certificate = signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(self._write(f"{self._number}.pem", certificate), self._write(f"{self._number}.key", secret))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 9 * DAY)
            .not_valid_after(until)
        )

    def _write(self, name: str, contents: bytes) -> str:
        path = self._folder / name
        path.write_bytes(contents)
        return str(path)
