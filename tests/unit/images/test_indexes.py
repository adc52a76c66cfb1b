"""What apt, pip and npm are told during a step: where to ask and whom to trust, no passwords."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from coldframe.images import indexes
from coldframe.images.indexes import settings
from coldframe.protocol.network import NetworkPolicy

PIP = {
    "index-url": ["https://user:secret@index.example/simple"],
    "extra-index-url": ["file:///srv/wheels", "http://other.example/simple"],
    "trusted-host": ["other.example"],
    "find-links": ["/srv/links"],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with settings of its own; returns the file of whom it trusts."""
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    monkeypatch.setattr(indexes, "pip_options", lambda: {**PIP, "cert": [str(bundle)]})
    monkeypatch.setattr(
        indexes, "npm_options", lambda: {"registry": "https://user:secret@registry.example/"}
    )
    monkeypatch.setattr(indexes, "preset_rules", lambda _: ())
    monkeypatch.setenv("SSL_CERT_FILE", "/none")
    return bundle


def test_settings_carry_addresses_and_trust_and_no_password(machine: Path) -> None:
    """What a step sees, a stranger's program sees."""
    told = settings(NetworkPolicy.parse("presets"))

    assert told.env["PIP_INDEX_URL"] == "https://index.example/simple"
    assert told.env["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert told.env["PIP_EXTRA_INDEX_URL"] == "http://other.example/simple"
    assert told.env["PIP_TRUSTED_HOST"] == "other.example"
    assert told.env["npm_config_registry"] == "https://registry.example/"
    assert told.env["SSL_CERT_FILE"] == told.env["PIP_CERT"] == "/.coldframe/ca.crt"
    assert dict(told.files)["ca.crt"] == b"certificates"
    assert b"/.coldframe/ca.crt" in dict(told.files)["apt.conf"]
    assert "secret" not in repr(told)


def test_settings_of_another_policy_are_trust_alone(machine: Path) -> None:
    """It does not speak of indexes."""
    told = settings(NetworkPolicy.parse("files.example"))

    assert not any(name.startswith(("PIP_INDEX", "npm_", "APT_")) for name in told.env)
    assert [name for name, _ in told.files] == ["ca.crt"]


def test_settings_of_no_network_ask_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost a second each."""
    monkeypatch.setattr(indexes, "pip_options", lambda: pytest.fail("asked"))

    assert settings(NetworkPolicy()) == indexes.Settings()


def test_settings_without_a_file_of_trust_leave_the_images_own(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that names nothing would break every connection."""
    machine.unlink()
    assert ssl.get_default_verify_paths().cafile is None

    told = settings(NetworkPolicy.parse("presets"))

    assert "SSL_CERT_FILE" not in told.env
    assert told.files == ()
