"""The DNS names of a certificate, read from its DER (X.690) as RFC 5280 lays it out.

gRPC tells subject alternative names without their kinds, so that a URI or an address of mail would pass for a DNS name.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import lru_cache

SEQUENCE, OBJECT_ID, OCTET_STRING, BOOLEAN = 0x30, 0x06, 0x04, 0x01
EXTENSIONS = 0xA3
"""Of a TBSCertificate: [3] EXPLICIT."""
DNS_NAME = 0x82
"""Of a GeneralName: [2] IMPLICIT IA5String."""
ALTERNATIVE_NAMES = bytes((0x55, 0x1D, 0x11))
"""2.5.29.17, subjectAltName."""


@lru_cache(maxsize=1024)
def dns_names(certificate: bytes) -> frozenset[str]:
    """Of a certificate in PEM, as they are written in it. Empty where it has none, and where anything on the way to
    them is not as it has to be."""
    try:
        return frozenset(_dns_names(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii").strip())))
    except ValueError:
        return frozenset()


def _dns_names(der: bytes) -> Iterator[str]:
    found = [value for object_id, value in _extensions(der) if object_id == ALTERNATIVE_NAMES]
    if len(found) > 1:
        raise ValueError("a certificate may hold an extension once")
    for extension in found:
        for tag, content in _elements(_only(extension, SEQUENCE)):
            if tag == DNS_NAME:
                yield content.decode("ascii")


def _extensions(der: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(object id, value) of each."""
    certificate = list(_elements(_only(der, SEQUENCE)))
    if [tag for tag, _ in certificate[:2]] != [SEQUENCE, SEQUENCE] or len(certificate) != 3:
        raise ValueError("no certificate: it is what is signed, an algorithm and a signature")
    for tag, content in _elements(certificate[0][1]):
        if tag != EXTENSIONS:
            continue
        for kind, extension in _elements(_only(content, SEQUENCE)):
            parts = list(_elements(extension))
            tags = [part for part, _ in parts]
            if kind != SEQUENCE or tags not in ([OBJECT_ID, OCTET_STRING], [OBJECT_ID, BOOLEAN, OCTET_STRING]):
                raise ValueError("no extension: it is an object id, whether it is critical, and a value")
            yield parts[0][1], parts[-1][1]


def _only(der: bytes, tag: int) -> bytes:
    """Content of the one element that there is."""
    elements = list(_elements(der))
    if len(elements) != 1 or elements[0][0] != tag:
        raise ValueError(f"there must be one element, of tag {tag:#x}")
    return elements[0][1]


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """(tag, content) of each element. Raises ValueError for tags of several bytes, for lengths that are indefinite or
    not written in the shortest way, and where an element ends behind the last byte."""
    at = 0
    while at < len(der):
        if at + 2 > len(der) or der[at] & 0x1F == 0x1F:
            raise ValueError("no element that a certificate may hold")
        tag, length = der[at], der[at + 1]
        at += 2
        if length >= 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            if not size or at + size > len(der) or length < 0x80 or length >> 8 * (size - 1) == 0:
                raise ValueError("a length must be definite and as short as it can be")
            at += size
        if at + length > len(der):
            raise ValueError("an element ends behind the last byte")
        yield tag, der[at : at + length]
        at += length
