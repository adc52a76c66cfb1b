"""A trajectory is shared; a key in it is a key for everybody."""

from __future__ import annotations

import pytest

from coldframe.trajectories.redaction import Redactor, is_secret_name, redact_url

KEY = "sk-0123456789abcdef"


def test_known_secret_is_taken_out_of_text_output_and_json() -> None:
    """Whoever printed it, and wherever: commands, outputs, messages of errors."""
    redactor = Redactor([KEY])

    assert KEY not in redactor.text(f"curl -H 'Bearer {KEY}'")
    assert redactor.output(b"\xff" + KEY.encode()) == b"\xff[redacted]"
    assert KEY not in str(redactor.json({"a": [{"b": f"x{KEY}y"}]}))


def test_secret_that_contains_another_leaves_nothing_behind() -> None:
    """Replacing the shorter one first would leave the rest of the longer one readable."""
    assert Redactor(["abcdef", "abcdef-ghijkl"]).text("abcdef-ghijkl") == "[redacted]"


def test_short_value_is_not_searched_for() -> None:
    """A `secret` of one digit would blank every such digit in the record."""
    assert Redactor(["1"]).text("exit code 1") == "exit code 1"


@pytest.mark.parametrize(
    "name", ["API_KEY", "OPENAI_API_KEY", "db_password", "GITHUB_TOKEN", "aws_secret", "AUTH"]
)
def test_secret_name_hides_its_value(name: str) -> None:
    """Values that we were never told are secret are recognised by their names."""
    assert Redactor().environment({name: "v", "HOME": "/root"}) == {
        name: "[redacted]",
        "HOME": "/root",
    }
    assert Redactor().text(f"{name}=hunter2 ./run") == f"{name}=[redacted] ./run"


@pytest.mark.parametrize("name", ["HOME", "max_tokens", "prompt_tokens", "tokenizer", "KEYBOARD"])
def test_ordinary_name_keeps_its_value(name: str) -> None:
    """The control: a record in which everything is hidden explains nothing."""
    assert not is_secret_name(name)
    assert Redactor().text(f"{name}=x") == f"{name}=x"


def test_password_with_an_at_sign_is_taken_out_of_text_whole() -> None:
    """What stood behind it was left."""
    said = "no route to postgres://me:p@ss@w0rd@db:5/x, as me@here says"
    assert Redactor().text(said) == "no route to postgres://[redacted]@db:5/x, as me@here says"


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("https://me:pass@host:8/v1?a=1", "https://[redacted]@host:8/v1?a=1"),
        ("https://host/v1?api_key=abc&b=2", "https://host/v1?api_key=[redacted]&b=2"),
        ("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1"),
    ],
)
def test_url_loses_its_password_and_secret_parameters(url: str, clean: str) -> None:
    """base_url goes into config.json and into every trajectory."""
    assert redact_url(url) == clean
