"""Base images: whose mirror is used, what is left of it, and what failures say."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from coldframe.images import bootstrap as room
from coldframe.images.bootstrap import (
    BootstrapError,
    bootstrap,
    connection_options,
    is_static,
    own_sources,
    without_passwords,
)
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import CapabilityError, InvalidRequestError
from tests.fixtures.waiting import wait_until

TARGETS = (
    "http://mirror.test/debian bookworm main\n"
    "http://mirror.test/debian bookworm contrib\n"
    "http://mirror.test/debian bookworm-updates main\n"
    "http://mirror.test/security bookworm-security main\n"
    "http://mirror.test/backports bookworm-backports main\n"
    "http://other.test/tool stable main\n"
)


@pytest.fixture(autouse=True)
def _no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_KEYRING", Path("/nonexistent"))


def test_own_sources_follow_this_machines_mirror_for_any_suite() -> None:
    """Behind a firewall only that mirror can be reached."""
    assert own_sources(TARGETS, "bookworm", "trixie") == [
        "deb http://mirror.test/debian trixie main",
        "deb http://mirror.test/debian trixie-updates main",
        "deb http://mirror.test/security trixie-security main",
    ]
    assert own_sources(TARGETS, "bookworm", "sid") == ["deb http://mirror.test/debian sid main"]


def test_own_sources_of_another_distribution_are_none() -> None:
    """Its mirrors have no Debian; mmdebstrap's default is used."""
    assert own_sources("http://mirror.test/ubuntu noble main\n", None, "bookworm") == []
    assert own_sources(TARGETS, "noble", "bookworm") == []
    assert own_sources("", "bookworm", "bookworm") == []


def test_own_sources_read_a_mirror_list(tmp_path: Path) -> None:
    """Debian's cloud images name a file of mirrors instead of a mirror."""
    (tmp_path / "list").write_text("# mirrors\nhttp://a.test/debian priority:1\nhttp://b.test/\n")

    lines = own_sources(f"mirror+file:{tmp_path}/list bookworm main", "bookworm", "bookworm")

    assert lines == ["deb http://a.test/debian bookworm main"]


def test_connection_options_are_those_that_reach_the_mirror() -> None:
    """A proxy is needed; hooks of the host's apt must not run in the image."""
    dump = (
        'APT::Update::Post-Invoke:: "rm -rf /";\n'
        'Acquire::http::Proxy "http://proxy.test:3128";\n'
        'Acquire::https::CaInfo "/etc/ca.pem";\n'
        'Acquire::IndexTargets::deb::Packages::Optional "0";\n'
        'DPkg::Post-Invoke:: "x";\n'
    )
    kept = [line.split(" ")[0] for line in connection_options(dump)]

    assert kept == [
        "Dir::Etc::netrc",
        "Dir::Etc::netrcparts",
        "Acquire::http::Proxy",
        "Acquire::https::CaInfo",
    ]


def test_without_passwords_leaves_addresses_and_nothing_secret() -> None:
    """Agents read /etc/apt/sources.list; an @ of a password that is not escaped ends it nowhere."""
    text = "deb [signed-by=/a@b.gpg] https://user:p%40s@s@mirror.test/debian bookworm main"

    assert without_passwords(text) == (
        "deb [signed-by=/a@b.gpg] https://mirror.test/debian bookworm main"
    )


@pytest.mark.parametrize("name", ["alpine", "debian", "debian:../x", "debian:a b", "busybox:-"])
def test_bootstrap_of_another_name_is_refused(store: ImageStore, name: str) -> None:
    """The suite goes to a program's command line; nothing odd may get there."""
    with pytest.raises(InvalidRequestError):
        bootstrap(store, name)


def test_bootstrap_without_mmdebstrap_names_the_command(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first thing a new machine lacks."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(CapabilityError, match="apt-get install mmdebstrap"):
        bootstrap(store, "debian:bookworm")
    assert list((store.root / "tmp").iterdir()) == []


def test_bootstrap_without_network_says_so(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apt says it in forty lines. A proxy that refuses stands for a network that is down."""
    refusing = [f'Acquire::{kind}::Proxy "http://127.0.0.1:9";' for kind in ("http", "https")]
    monkeypatch.setattr(room, "connection_options", lambda _: [*refusing, 'Acquire::Retries "0";'])

    monkeypatch.setattr(room, "REPORT_S", 0.01)
    lines: list[str] = []

    with pytest.raises(BootstrapError, match="no network: apt cannot reach its mirror"):
        bootstrap(store, "debian:bookworm", progress=lines.append)
    assert any(line.startswith("still running after") for line in lines), "silence looks hung"
    assert store.list() == ()
    assert list((store.root / "tmp").iterdir()) == []


def test_bootstrap_again_does_nothing_unless_forced(store: ImageStore) -> None:
    """`make setup` runs it every time."""
    first = bootstrap(store, "busybox")
    made = store.inspect("busybox").created_at

    lines: list[str] = []
    assert bootstrap(store, "busybox", progress=lines.append) == first
    assert (store.inspect("busybox").created_at, lines) == (
        made,
        ["busybox:latest is there already"],
    )

    assert bootstrap(store, "busybox", force=True) == first
    assert store.inspect("busybox").created_at > made


def test_is_static_tells_programs_apart(tmp_path: Path) -> None:
    """A dynamic busybox would not start in an image that has no libraries."""
    (tmp_path / "script").write_text("#!/bin/sh\n" + " " * 100)

    assert is_static(Path("/bin/busybox"))
    assert not is_static(Path("/bin/sh").resolve())
    assert not is_static(tmp_path / "script")


def test_program_that_hangs_up_on_its_group_does_not_end_us(tmp_path: Path) -> None:
    """mmdebstrap does when it is ended: a full disk was told by nobody, with exit code 129."""
    code = """
        import sys; from pathlib import Path
        from coldframe.images import bootstrap
        work = Path(sys.argv[1]); (work / "in").touch()
        endless = "trap 'kill -HUP 0; exit 1' TERM; echo; while sleep 0.01; do :; done"
        hang_up = ["sh", "-c", endless]
        try:
            with bootstrap._running(hang_up, work / "in", work / "log") as stream:
                stream.read(1)
                raise OSError("full")
        except OSError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "full\n"), done


def test_killed_bootstrap_leaves_no_process_no_mount_and_nothing_after_gc(tmp_path: Path) -> None:
    """mmdebstrap would go on for a minute, with a tree in /tmp and mounts of the host's own."""
    home = tmp_path / "home"
    command = [sys.executable, "-m", "coldframe.cli.main"]
    environment = os.environ | {"COLDFRAME_HOME": str(home), "TMPDIR": str(tmp_path)}

    def processes() -> list[str]:
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"COLDFRAME_HOME={home}\0".encode() in (one / "environ").read_bytes():
                    found.append(one.name)
        return found

    with subprocess.Popen(
        [*command, "image", "bootstrap", "debian:bookworm"],
        env=environment,
        stderr=subprocess.DEVNULL,
    ) as killed:
        wait_until(lambda: any(home.glob("images/tmp/*/tmp/mmdebstrap.*/etc")))
        assert len(processes()) > 1
        killed.kill()
    wait_until(lambda: not processes())
    mounts = Path("/proc/mounts").read_text()
    left = list(tmp_path.glob("mmdebstrap*"))
    reaped = subprocess.run([*command, "gc"], env=environment, capture_output=True, check=False)

    assert str(tmp_path) not in mounts
    assert left == []
    assert reaped.returncode == 0, reaped.stderr
    assert list((home / "images" / "tmp").iterdir()) == []
