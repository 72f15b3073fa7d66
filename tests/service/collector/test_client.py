"""The client keeps its token to itself, and to servers that prove who they are."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import warnings
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serving import settings
from sfumato.collector import tokens
from sfumato.collector.client import AdminClient, study_keys
from sfumato.collector.serve import running
from sfumato.errors import ServiceError, SpecError, StudyError
from sfumato.simulation import network_fleet


def make_certificate(folder: Path) -> tuple[str, str]:
    """The files of a self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert_file), str(key_file)


def test_tls_works_with_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_fleet, "STUDY_SECONDS", 0.0)
    cert, key = make_certificate(tmp_path)
    with running(settings(tmp_path, tls_cert=cert, tls_key=key), with_worker=False) as collector:
        assert collector.address.startswith("https://")
        token = tokens.create(collector.store, role="analyst", name="Ada", days=1)[1]
        assert AdminClient(collector.address, token, ca=cert).me()["name"] == "Ada"
        with pytest.raises(ServiceError, match="cannot be reached"):
            AdminClient(collector.address, token).me()
        public = bytes.fromhex(collector.public_key)
        with (
            network_fleet.NetworkFleet(
                collector.address, public, [["oak"]], connections=1, ca=Path(cert)
            ) as fleet,
            pytest.raises(ServiceError, match="does not offer"),
        ):  # it was reached
            fleet.ask("none")
        host, port = collector.address.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP")


def test_old_tls_is_refused(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with running(settings(tmp_path, tls_cert=cert, tls_key=key), with_worker=False) as collector:
        host, port = collector.address.removeprefix("https://").split(":")
        for latest, is_accepted in (
            (ssl.TLSVersion.TLSv1_2, True),
            (ssl.TLSVersion.TLSv1_1, False),
        ):
            context = ssl.create_default_context(cafile=cert)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # old versions on purpose
                context.minimum_version = ssl.TLSVersion.TLSv1
                context.maximum_version = latest
            context.set_ciphers("ALL:@SECLEVEL=0")
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                assert shakes_hands(raw, context, host) == is_accepted


def shakes_hands(raw: socket.socket, context: ssl.SSLContext, host: str) -> bool:
    try:
        context.wrap_socket(raw, server_hostname=host).close()
    except ssl.SSLError:
        return False
    return True


@pytest.mark.parametrize("which", ["tls_cert", "tls_key"])
def test_a_certificate_that_cannot_be_read_is_refused(tmp_path: Path, which: str) -> None:
    cert, key = make_certificate(tmp_path)
    files = {"tls_cert": cert, "tls_key": key} | {which: str(tmp_path / "none.pem")}
    with pytest.raises(SpecError, match="cannot be used"), running(settings(tmp_path, **files)):
        pass


def test_a_token_is_never_shown() -> None:
    assert "sfu_secret" not in repr(AdminClient("http://127.0.0.1:1", "sfu_secret"))
    with pytest.raises(ServiceError) as caught:
        AdminClient("http://127.0.0.1:1", "sfu_secret").me()
    assert "sfu_secret" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("token", ["two\r\nlines", "é", "a\0"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(SpecError) as caught:
        AdminClient("http://127.0.0.1:1", token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "server",
    ["", "ftp://a", "https://", "http:///v1", "https://a/?b", "a:1", "http://a:b", "http://[::1"],
)
def test_an_invalid_address_is_refused(server: str) -> None:
    with pytest.raises(SpecError, match="a server must be"):
        AdminClient(server, "sfu_x")


def test_plain_http_is_for_this_machine_unless_told() -> None:
    with pytest.raises(SpecError, match="plain http"):
        AdminClient("http://collector.example", "sfu_x")
    AdminClient("http://collector.example", "sfu_x", plain_http=True)
    AdminClient("http://[::1]:8420", "sfu_x")


def test_a_server_that_is_no_collector_is_an_error(tmp_path: Path) -> None:
    with running(settings(tmp_path), with_worker=False) as collector:
        wrong = AdminClient(f"{collector.address}/elsewhere", "sfu_x")
        with pytest.raises(ServiceError, match="nothing at this address"):
            wrong.me()


def test_a_study_file_is_sent_with_its_items(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        'question = "frequencies"\ntrust = "local"\nepsilon = inf\ndevices = 10\n'
        'dictionary = "trees.csv"\ndictionary_column = "tree"\n'
    )
    (tmp_path / "trees.csv").write_text("number,tree\n1,oak\n2,elm\n")
    keys = study_keys(tmp_path / "study.toml")
    assert keys["items"] == ["oak", "elm"]
    assert keys["study"]["epsilon"] is None
    assert not {"dictionary", "dictionary_column"} & keys["study"].keys()


def test_a_study_file_that_is_wrong_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('question = "frequencies"\n')
    with pytest.raises(StudyError):
        study_keys(tmp_path / "study.toml")
