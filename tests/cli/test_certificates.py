"""`ebb certificates`, and the files of TLS that commands are given."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from typer.testing import CliRunner

from cluster_manager.authority import CertificateAuthority
from ebbtide.cli import certificates
from ebbtide.cli.certificates import Authority, Purpose, make_certificates
from ebbtide.cli.main import app
from ebbtide.client import TLSFiles
from ebbtide.errors import EbbError


def test_certificates_are_made_for_one_ca_again_and_again(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    cas = set()
    for host in ("host-a=127.0.0.1", "host-b", "host-b=192.0.2.7"):
        done = CliRunner().invoke(app, ["certificates", str(directory), "--host", host, "-o", "json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["ca"] == str(directory / "ca.pem")
        cas.add((directory / "ca.pem").read_bytes())
    assert len(cas) == 1
    names = {path.name for path in directory.iterdir()}
    assert names == {f"{stem}.{end}" for stem in ("ca", "ebb-manager", "host-a", "host-b") for end in ("pem", "key")}
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.key")} == {0o600}


def test_a_host_that_is_added_leaves_the_pair_of_the_manager_as_it_is(tmp_path: Path) -> None:
    def pair() -> list[bytes]:
        return [(tmp_path / f"ebb-manager.{end}").read_bytes() for end in ("pem", "key")]

    for words in (["--manager", "192.0.2.1"], ["--host", "host-a"]):
        assert CliRunner().invoke(app, ["certificates", str(tmp_path), *words]).exit_code == 0
        before = pair()
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-b"]).exit_code == 0
    assert pair() == before
    certificate = x509.load_pem_x509_certificate(before[0])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["192.0.2.1"]
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.2"]).exit_code == 0
    assert all(one != other for one, other in zip(before, pair(), strict=True))


def test_a_certificate_that_cannot_be_written_leaves_the_pair_that_was_there(tmp_path: Path) -> None:
    authority = Authority.in_directory(tmp_path, 30)
    make_certificates(authority, [Purpose.host("host-a")], 30)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Enough for a key and not for a certificate.
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, room[1]))
    try:
        with pytest.raises(EbbError, match="File too large"):
            make_certificates(authority, [Purpose.host("host-a")], 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("host", ["ebb-manager", "ca", "next-ca", "old-ca", "Host A", "=127.0.0.1", "host-a=no name"])
def test_no_certificate_is_made_that_could_be_taken_for_another_ones(host: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["certificates", str(tmp_path / "tls"), "--host", host])
    assert isinstance(done.exception, EbbError)
    assert not list(tmp_path.glob("tls/host*"))


def test_a_ca_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("junk")
    done = CliRunner().invoke(app, ["certificates", str(tmp_path)])
    assert isinstance(done.exception, EbbError)
    assert str(tmp_path) in str(done.exception)


def test_files_of_tls_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    for files, said in (
        (TLSFiles(ca=tmp_path / "missing"), "cannot use the CA certificate"),
        (TLSFiles(key=tmp_path / "key"), "--certificate and --key need each other"),
    ):
        with pytest.raises(EbbError, match=said):
            files.context()
    assert TLSFiles().context() is None


def ends(path: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def test_a_ca_outlives_what_it_signs_by_years(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-a"])
    assert done.exit_code == 0, done.output
    now = datetime.datetime.now(datetime.UTC)
    assert (ends(tmp_path / "ca.pem") - now).days in (3649, 3650)
    assert (ends(tmp_path / "host-a.pem") - now).days in (364, 365)


def test_a_ca_that_ends_before_its_certificates_would_is_refused_and_what_to_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As earlier versions made it.
    monkeypatch.setattr(certificates, "CA_DAYS", 1)
    Authority.in_directory(tmp_path, 100)
    for days, said in (
        ("365", r"valid until .*give --days 99 or less"),
        ("100", "where it has ended already, a new one in another directory"),
    ):
        done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-a", "--days", days])
        assert isinstance(done.exception, EbbError)
        assert re.search(said, str(done.exception)), done.exception
    assert not (tmp_path / "host-a.pem").exists()
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-a", "--days", "99"]).exit_code == 0


def test_in_the_last_year_of_a_ca_hosts_are_signed_by_the_one_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(certificates, "CA_DAYS", 1)
        make_certificates(Authority.in_directory(tmp_path, 100), [Purpose.manager(["192.0.2.1"])], 99)
    assert CliRunner().invoke(app, ["ca", "next", str(tmp_path)]).exit_code == 0
    done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-a"])
    assert done.exit_code == 0, done.exception
    assert issuer_of(tmp_path / "host-a.pem").startswith("CN=Ebbtide CA of 2")
    # The manager's is still to be of the one before.
    done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"])
    assert re.search("give --days 99 or less, or drop it by `ebb ca finish", str(done.exception))


def test_a_ca_that_has_ended_while_it_was_followed_is_dropped_without_a_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"]).exit_code == 0
    with monkeypatch.context() as earlier:
        # Made ten years ago.
        earlier.setattr(certificates, "CA_DAYS", 0)
        (tmp_path / "ca.pem").unlink()
        Authority.in_directory(tmp_path, 0)
    Authority._made(tmp_path, certificates._NEXT, "Ebbtide CA of today", certificates.CA_DAYS)
    with (tmp_path / "ca.pem").open("ab") as both:
        both.write((tmp_path / "next-ca.pem").read_bytes())
    # A manager that starts now vouches for nothing.
    loaded = CertificateAuthority.load(tmp_path / "ca.pem", tmp_path / "ca.key", None, tmp_path / "next-ca.key")
    assert (loaded.following is not None, loaded.proof) == (True, "")
    done = CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"])
    assert "drop it by `ebb ca finish" in str(done.exception)
    done = CliRunner().invoke(app, ["ca", "finish", str(tmp_path), "--manager", "http://127.0.0.1:9"])
    assert done.exit_code == 0, done.exception
    assert "hosts that stay silent are to be invited again" in done.output
    assert issuer_of(tmp_path / "ebb-manager.pem") == "CN=Ebbtide CA of today"
    assert not list(tmp_path.glob("next-ca.*"))


def issuer_of(path: Path) -> str:
    return x509.load_pem_x509_certificate(path.read_bytes()).issuer.rfc4514_string()


def in_bundle(path: Path) -> list[bytes]:
    """The fingerprints of the certificates in a file."""
    return [one.fingerprint(hashes.SHA256()) for one in x509.load_pem_x509_certificates(path.read_bytes())]


def test_a_ca_that_is_to_follow_signs_hosts_at_once_and_the_manager_at_the_end(tmp_path: Path) -> None:
    words = ["certificates", str(tmp_path), "--manager", "192.0.2.1", "--manager", "mgr.example", "--host", "host-a"]
    assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "ca.key").chmod(0o640)
    first = in_bundle(tmp_path / "ca.pem")
    done = CliRunner().invoke(app, ["ca", "next", str(tmp_path), "-o", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["next_ca_key"] == str(tmp_path / "next-ca.key")
    assert (tmp_path / "next-ca.key").stat().st_mode & 0o777 == 0o640, "as the manager reads the other one"
    both = [*first, *in_bundle(tmp_path / "next-ca.pem")]
    assert in_bundle(tmp_path / "ca.pem") == both
    again = CliRunner().invoke(app, ["ca", "next", str(tmp_path)])
    assert "is to follow already" in str(again.exception)
    # Broken off before the file with both was written: it is written now.
    (tmp_path / "ca.pem").write_text(
        (tmp_path / "ca.pem").read_text().partition("-----END")[0] + "-----END CERTIFICATE-----\n"
    )
    assert CliRunner().invoke(app, ["ca", "next", str(tmp_path)]).exit_code == 0
    assert in_bundle(tmp_path / "ca.pem") == both
    own = (tmp_path / "ebb-manager.pem").read_bytes()
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--host", "host-a"]).exit_code == 0
    assert (tmp_path / "ebb-manager.pem").read_bytes() == own
    assert issuer_of(tmp_path / "host-a.pem").startswith("CN=Ebbtide CA of 2")
    # Until the end hosts need not know the CA that is to follow.
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"]).exit_code == 0
    assert issuer_of(tmp_path / "ebb-manager.pem") == "CN=Ebbtide CA"


def test_a_ca_that_is_to_follow_is_read_by_the_manager_also_where_it_was_broken_off_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["certificates", str(tmp_path)]).exit_code == 0
    (tmp_path / "ca.key").chmod(0o640)
    (tmp_path / "ca.pem").chmod(0o604)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as at_work:
        at_work.setattr(certificates, "_as_before", killed)
        with pytest.raises(KeyboardInterrupt):
            certificates.begin_rollover(tmp_path)
    certificates.begin_rollover(tmp_path)
    modes = {end: (tmp_path / f"next-ca.{end}").stat().st_mode & 0o777 for end in ("key", "pem")}
    assert modes == {"key": 0o640, "pem": 0o604}


def starts_with_any_options(directory: Path) -> None:
    """Whatever was done: a manager that starts now has a CA and its key, with the options of before and of later."""
    for next_key in (None, directory / "next-ca.key"):
        CertificateAuthority.load(directory / "ca.pem", directory / "ca.key", directory / "ebb-manager.pem", next_key)


def finished_without_a_manager(directory: Path) -> None:
    """Call `ebb ca finish` again, if there is anything left to do."""
    if not (directory / "next-ca.pem").exists():
        return
    done = CliRunner().invoke(app, ["ca", "finish", str(directory), "--manager", "http://127.0.0.1:9"])
    assert done.exit_code == 0, done.exception
    assert "had ended" not in done.output


@pytest.mark.parametrize("broken_off_after", range(6))
def test_a_ca_that_has_followed_is_alone_however_often_that_is_broken_off(
    tmp_path: Path, broken_off_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"]).exit_code == 0
    certificates.begin_rollover(tmp_path)
    old, new = ((tmp_path / f"{name}.key").read_bytes() for name in ("ca", "next-ca"))
    following, replacing = in_bundle(tmp_path / "next-ca.pem"), certificates._replace
    steps = 0

    def replace(*given: Any, **named: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > broken_off_after:
            raise OSError(28, "No space left on device", str(given[0]))
        replacing(*given, **named)

    monkeypatch.setattr(certificates, "_replace", replace)
    authority = Authority.following(tmp_path, 1)
    assert authority is not None
    with contextlib.suppress(EbbError):
        certificates.finish_rollover(tmp_path, authority, 1)
    monkeypatch.undo()
    starts_with_any_options(tmp_path)
    if (tmp_path / "ca.key").read_bytes() == new:
        finished_without_a_manager(tmp_path)
    else:
        done = CliRunner().invoke(app, ["ca", "finish", str(tmp_path), "--manager", "http://127.0.0.1:9"])
        assert done.exception is not None, "nothing of the hosts is known yet"
        certificates.finish_rollover(tmp_path, authority, 1)
    starts_with_any_options(tmp_path)
    assert in_bundle(tmp_path / "ca.pem") == following
    assert ((tmp_path / "ca.key").read_bytes(), (tmp_path / "old-ca.key").read_bytes()) == (new, old)
    assert (tmp_path / "old-ca.key").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("next-ca.*"))
    assert issuer_of(tmp_path / "ebb-manager.pem").startswith("CN=Ebbtide CA of 2")
    names = x509.load_pem_x509_certificate((tmp_path / "ebb-manager.pem").read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in found] == ["192.0.2.1"]


def test_no_ca_follows_one_that_is_not_there_or_of_which_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["ca", "next", str(tmp_path)])
    assert "there is no CA in" in str(done.exception)
    monkeypatch.setattr(certificates, "CA_DAYS", 0)
    Authority.in_directory(tmp_path, 0)
    done = CliRunner().invoke(app, ["ca", "next", str(tmp_path)])
    assert re.search("valid until .*where it has ended already, a new one in another", str(done.exception))
    assert not list(tmp_path.glob("next-ca*"))


def test_no_certificate_outlives_its_ca(tmp_path: Path) -> None:
    authority = Authority.in_directory(tmp_path, 30)
    make_certificates(authority, [Purpose.host("host-a")], 4000)
    assert ends(tmp_path / "host-a.pem") == ends(tmp_path / "ca.pem")


@pytest.mark.parametrize("removed", [0, 1])
def test_a_ca_that_has_followed_when_it_is_killed_before_it_has_tidied_up_blocks_nothing(
    tmp_path: Path, removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["certificates", str(tmp_path), "--manager", "192.0.2.1"]).exit_code == 0
    certificates.begin_rollover(tmp_path)
    authority = Authority.following(tmp_path, 1)
    assert authority is not None
    left, unlink = removed, Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if path.name.startswith("next-ca"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        certificates.finish_rollover(tmp_path, authority, 1)
    monkeypatch.undo()
    starts_with_any_options(tmp_path)
    finished_without_a_manager(tmp_path)
    certificates.begin_rollover(tmp_path)
    assert Authority.following(tmp_path, 1) is not None
