"""The DNS names of certificates, against those that `cryptography` reads."""

from __future__ import annotations

import datetime
import ipaddress
import ssl

import pytest
from conftest import scaled
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serving.dns_names import dns_names

KEY = ec.generate_private_key(ec.SECP256R1())
WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-.*_", min_size=1, max_size=20) | st.just("coordinator")
LONG = st.integers(100, 700).map("x".__mul__)
NAMES = st.one_of(
    (WORDS | LONG).map(x509.DNSName),
    WORDS.map(x509.UniformResourceIdentifier),
    WORDS.map(x509.RFC822Name),
    st.ip_addresses().map(x509.IPAddress),
    st.just(x509.RegisteredID(x509.ObjectIdentifier("1.2.3.4"))),
    WORDS.map(lambda word: x509.OtherName(x509.ObjectIdentifier("1.2.3"), bytes((0x0C, len(word))) + word.encode())),
    WORDS.map(lambda word: x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)]))),
)
OTHER_EXTENSIONS = (
    (x509.BasicConstraints(ca=False, path_length=None), True),
    (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False),
    (x509.SubjectKeyIdentifier.from_public_key(KEY.public_key()), False),
    (x509.IssuerAlternativeName([x509.DNSName("coordinator")]), False),
)


def certificate(
    names: list[x509.GeneralName] | None, *, subject: str = "coordinator", critical: bool = False, others: int = 1
) -> bytes:
    """DER. names: None for no such extension. others: of OTHER_EXTENSIONS, bit by bit."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(others + 1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2060, 1, 1))
    )
    for number, (extension, is_critical) in enumerate(OTHER_EXTENSIONS):
        if number == 2 and names is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=critical)
        if others >> number & 1:
            builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def ours(der: bytes) -> frozenset[str]:
    return dns_names(ssl.DER_cert_to_PEM_cert(der).encode())


def theirs(der: bytes) -> frozenset[str]:
    try:
        found = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(found.value.get_values_for_type(x509.DNSName))


@settings(max_examples=scaled(1000), deadline=None)
@given(st.none() | st.lists(NAMES, min_size=1, max_size=12), WORDS, st.booleans(), st.integers(0, 15))
def test_they_are_those_that_cryptography_reads(
    names: list[x509.GeneralName] | None, subject: str, critical: bool, others: int
) -> None:
    der = certificate(names, subject=subject, critical=critical, others=others)
    expected = {name.value for name in names or () if isinstance(name, x509.DNSName)}
    assert ours(der) == theirs(der) == expected


WHOLE = certificate(
    [x509.DNSName("alice"), x509.UniformResourceIdentifier("coordinator"), x509.DNSName("y" * 200)], others=15
)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@settings(max_examples=scaled(3000), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_bent_certificates_never_have_names_that_cryptography_does_not_read(changes: list[tuple[int, int]]) -> None:
    bent = bytearray(WHOLE)
    for at, value in changes:
        bent[at] = value
    found = ours(bytes(bent))
    try:
        expected = theirs(bytes(bent))
    except Exception:  # of many kinds: it is no certificate to the other reader
        return
    assert found in (frozenset(), expected)


def test_cut_certificates_and_other_things_have_none() -> None:
    assert ours(WHOLE) == {"alice", "y" * 200}
    for length in range(len(WHOLE)):
        assert not ours(WHOLE[:length]), length
    assert not ours(WHOLE + b"\0")
    for other in (b"", b"no certificate", b"\xff", ssl.DER_cert_to_PEM_cert(WHOLE).encode()[:-20]):
        assert not dns_names(other)


def der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    assert len(content) < 0x80
    return bytes((tag, len(content))) + content


def bare(*extensions: bytes) -> bytes:
    """No more of a certificate than what is read."""
    return der(0x30, der(0x30, der(0xA3, der(0x30, *extensions))), der(0x30), der(0x03))


ALICE = der(0x30, b"\x06\x03\x55\x1d\x11", der(0x04, der(0x30, der(0x82, b"alice"))))


@pytest.mark.parametrize(
    "malformed",
    [
        bare(ALICE, ALICE),
        bare(ALICE.replace(b"alice", b"al\xefce")),
        bare(der(0x30, b"\x06\x03\x55\x1d\x11", der(0x04, der(0x30, der(0x82, b"alice")), b"\x05\0"))),
        bare(der(0x31, ALICE[2:])),
        bare(der(0x30, b"\x06\x03\x55\x1d\x11", der(0x24, der(0x30, der(0x82, b"alice"))))),
        b"\x30\x80" + bare(ALICE)[2:] + b"\0\0",
        b"\x30\x81" + bare(ALICE)[1:],
        b"\x30\x82\0" + bare(ALICE)[1:],
    ],
    ids=["twice", "not-ascii", "trailing", "set", "constructed", "indefinite", "long-form", "leading-zero"],
)
def test_what_is_not_as_it_has_to_be_has_none(malformed: bytes) -> None:
    assert ours(bare(ALICE)) == {"alice"}
    assert not ours(malformed)


def test_an_address_is_no_name() -> None:
    assert not ours(certificate([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]))
