"""The gateway's certificate, exchanged while it serves."""

import asyncio
import ssl
from pathlib import Path

import pytest
from certificates import Authority, Pair
from cryptography import x509
from gateway_stack import gateway_before
from ports import free_port
from scraping import scrape, total
from waiting import until

from outrider.errors import InvalidArgument


async def shown_by(address: str, authority: Authority, server_name: str = "") -> int:
    """Serial number of the certificate that a new connection sees."""
    trust = ssl.create_default_context(cafile=authority.ca)
    trust.check_hostname = bool(server_name)
    host, _, port = address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trust, server_hostname=server_name)
    told = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(told).serial_number


def spoil(path: str) -> None:
    Path(path).write_text("nonsense")


def join(pair: Pair, folder: Path) -> str:
    """Of one file with both."""
    both = folder / "both.pem"
    both.write_text(Path(pair.key).read_text() + Path(pair.cert).read_text())
    return str(both)


def serial_of(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(Path(pair.cert).read_bytes()).serial_number


@pytest.mark.parametrize("server_name", ["", "gateway"])
async def test_a_certificate_that_is_exchanged_is_shown_to_the_next_connection(
    tmp_path: Path, server_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    own, fresh = authority.certify("gateway"), authority.certify("gateway", "renewed")
    first, second = serial_of(own), serial_of(fresh)
    async with gateway_before("127.0.0.1:1", tls_cert=own.cert, tls_key=own.key) as gateway:
        assert await shown_by(gateway.address, authority, server_name) == first
        own.replace_by(fresh)
        assert await shown_by(gateway.address, authority, server_name) == second
        assert "stays in force" not in caplog.text
        spoil(own.cert)
        assert await shown_by(gateway.address, authority, server_name) == second
        assert f"{own.cert}, {own.key} changed, but what was read before stays in force" in caplog.text


async def test_who_does_not_finish_the_handshake_is_counted_and_not_served(tmp_path: Path) -> None:
    """In plaintext, and whoever trusts another authority; then somebody who may ask."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own, port = authority.certify("gateway"), free_port()

    async def counts() -> tuple[float, float]:
        samples = await scrape(port)
        return total(samples, "tls_handshakes_total"), total(samples, "connections_total")

    async with gateway_before("127.0.0.1:1", tls_cert=own.cert, tls_key=own.key, metrics_port=port) as gateway:
        host, _, number = gateway.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        assert await counts() == (1, 0)
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown_by(gateway.address, stranger)
        assert await counts() == (2, 0)
        await shown_by(gateway.address, authority)

        async def is_counted() -> bool:
            return await counts() == (3, 1)

        await until(is_counted)


async def test_a_key_may_be_in_the_certificates_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.certify("gateway")
    async with gateway_before("127.0.0.1:1", tls_cert=join(own, tmp_path)) as gateway:
        assert await shown_by(gateway.address, authority) == serial_of(own)


async def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.certify("gateway"), authority.certify("gateway")
    with pytest.raises(InvalidArgument, match="are no PEM certificate and its key") as refused:
        async with gateway_before("127.0.0.1:1", tls_cert=own.cert, tls_key=other.key):
            pytest.fail("it serves")
    assert refused.value.field == "tls_cert"
