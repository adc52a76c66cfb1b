"""Grading in the agent's own sandbox, against what agents and verifiers do in it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import pytest_asyncio

from coldframe.client import AsyncSandbox, AsyncSandboxClient
from coldframe.host import guard, guard_mount
from coldframe.host.guard_mount import Site, Wanted
from coldframe.protocol.errors import (
    GradingPreventedError,
    NotExecutedError,
    RewardInvalidError,
    RewardMissingError,
    VerifierDeadlineError,
    VerifierError,
)
from coldframe.protocol.models import ProcessInfo
from coldframe.rollouts import integrity, places
from coldframe.rollouts.load import load_task
from coldframe.rollouts.phases import kill_what_must_not_live_on
from coldframe.rollouts.verdicts import RewardUnvouchedError, TamperedError
from coldframe.rollouts.verifier import Verifier, VerifierNotExecutedError
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.store import BlobStore
from tests.unit.rollouts.tasks import BASE, write_task

pytestmark = pytest.mark.root
TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


@pytest_asyncio.fixture
async def native_sandbox(native_async_client: AsyncSandboxClient) -> AsyncSandbox:
    return await native_async_client.create_sandbox("debian:bookworm")


class Grade:
    """Grade the sandbox with a test.sh: `await grade("echo 1 > ...", toml="...")`."""

    def __init__(self, sandbox: AsyncSandbox, scratch: Path) -> None:
        self.sandbox, self.scratch = sandbox, scratch
        self.killed: list[ProcessInfo] = []
        self.survivors: tuple[ProcessInfo, ...] = ()

    async def __call__(
        self, script: str, *, toml: str = "", running: set[str] | None = None, secret: str = ""
    ) -> tuple[dict[str, float] | VerifierError, Verifier]:
        directory = write_task(
            self.scratch, toml=BASE + toml, tests__test_sh=f"#!/bin/sh\n{script}\n"
        )
        recorder = Recorder(BlobStore(self.scratch / "blobs"), Redactor([secret]))
        task = load_task(directory)
        verifier = Verifier(
            self.sandbox, task.steps[0].verifier, recorder, key_inputs=task.key_inputs
        )
        self.killed, self.survivors = await kill_what_must_not_live_on(
            self.sandbox, running or set(), everything=task.full_kill
        )
        try:
            return await verifier.grade(), verifier
        except VerifierError as error:
            return error, verifier


@pytest.fixture
def grade(native_sandbox: AsyncSandbox, tmp_path: Path) -> Grade:
    return Grade(native_sandbox, tmp_path)


async def test_verifier_with_a_reward_gives_the_verdict(grade: Grade) -> None:
    """The control of everything below."""
    verdict, verifier = await grade(f"echo 0.5 > {TEXT}; echo out; echo err >&2; exit 7")

    assert verdict == {"reward": 0.5}
    record = verifier.record()
    assert (record.exit_code, record.reward_file, record.user) == (7, TEXT, "0")
    assert record.stdout and verifier.recorder.blobs.get(record.stdout.stored) == b"out\n"
    assert record.stderr and verifier.recorder.blobs.get(record.stderr.stored) == b"err\n"


CASES = {
    "nothing": ("true", RewardMissingError),
    "nothing and failed": ("exit 1", RewardMissingError),
    "killed": ("kill -9 $$", RewardMissingError),
    "empty": (f": > {TEXT}", RewardInvalidError),
    "word": (f"echo passed > {TEXT}", RewardInvalidError),
    "nan": (f"echo nan > {TEXT}", RewardInvalidError),
    "bool": (f"echo true > {JSON}", RewardInvalidError),
    "string": (f"""echo '"1"' > {JSON}""", RewardInvalidError),
    "nested": (f"""echo '{{"a": {{"b": 1}}}}' > {JSON}""", RewardInvalidError),
    "twice": (f"""echo '{{"a": 1, "a": 0}}' > {JSON}""", RewardInvalidError),
    "not utf-8": (f"printf '\\377' > {TEXT}", RewardInvalidError),
    "bad json beside good text": (f"echo x > {JSON}; echo 1 > {TEXT}", RewardInvalidError),
    "link": (f"echo 1 > /tmp/r; ln -s /tmp/r {TEXT}", RewardInvalidError),
    "dangling link": (f"ln -s /absent {JSON}; echo 1 > {TEXT}", RewardInvalidError),
    "directory": (f"mkdir {JSON}; echo 1 > {TEXT}", RewardInvalidError),
    "fifo": (f"mkfifo {TEXT}", RewardInvalidError),
    "too large": (f"head -c 200000 /dev/zero | tr '\\0' 1 > {TEXT}", RewardInvalidError),
    "sparse and huge": (f"truncate -s 1T {TEXT}", RewardInvalidError),
    "linked directory": (
        "rm -r /logs/verifier; mkdir /tmp/v; echo 1 > /tmp/v/reward.txt; "
        "ln -s /tmp/v /logs/verifier",
        RewardMissingError,
    ),
    "linked logs": (
        "mkdir -p /tmp/l/verifier; echo 1 > /tmp/l/verifier/reward.txt; rm -r /logs; "
        "ln -s /tmp/l /logs",
        RewardMissingError,
    ),
}  # fmt: skip


async def test_verifier_without_a_valid_reward_gives_a_typed_failure(grade: Grade) -> None:
    """None of these is a 0: the policy would learn from the verifier's own faults."""
    found = {name: (await grade(script))[0] for name, (script, _) in CASES.items()}

    assert {name: type(one) for name, one in found.items()} == {
        name: error for name, (_, error) in CASES.items()
    }


async def test_verifier_prefers_json_to_text(grade: Grade) -> None:
    """Harbor's order; a verifier may write both for older readers."""
    verdict, _ = await grade(f"""echo '{{"a": 1, "b": 0}}' > {JSON}; echo 1 > {TEXT}""")

    assert verdict == {"a": 1.0, "b": 0.0}


PLANTED = {
    "reward.json": f"mkdir -p /logs/verifier; echo 1 > {JSON}",
    "reward.txt": f"mkdir -p /logs/verifier; echo 1 > {TEXT}",
    "link": f"mkdir -p /logs/verifier; echo 1 > /tmp/r; ln -s /tmp/r {TEXT}",
    "directory": f"mkdir -p {JSON}/deep/er",
    "fifo": f"mkdir -p /logs/verifier; mkfifo {JSON}",
    "verifier is a link": "mkdir -p /logs /tmp/v; echo 1 > /tmp/v/reward.txt; "
    "ln -s /tmp/v /logs/verifier",
    "verifier is a fifo": "mkdir -p /logs; mkfifo /logs/verifier",
    "logs is a link": "mkdir -p /tmp/l/verifier; echo 1 > /tmp/l/verifier/reward.json; "
    "ln -s /tmp/l /logs",
    "logs is a file": "echo 1 > /logs",
    "immutable modes": f"mkdir -p /logs/verifier; echo 1 > {TEXT}; chmod 0 /logs/verifier /logs",
}


async def test_verifier_removes_what_the_agent_planted(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """On other systems an agent that wrote reward.json beat the verifier."""
    for name, plant in PLANTED.items():
        await native_sandbox.exec(f"rm -rf /logs /tmp/v /tmp/l /tmp/r; {plant}")
        missing, _ = await grade("true")
        await native_sandbox.exec(f"rm -rf /logs /tmp/v /tmp/l /tmp/r; {plant}")
        zero, verifier = await grade(f"echo 0 > {TEXT}")

        assert isinstance(missing, RewardMissingError), name
        assert zero == {"reward": 0.0}, name
        assert verifier.record().removed, name


async def test_verifier_runs_only_its_own_tests(grade: Grade, native_sandbox: AsyncSandbox) -> None:
    """A conftest.py that the agent left in /tests would run inside the verifier."""
    await native_sandbox.exec("mkdir /tests; touch /tests/conftest.py")
    script = f"[ $(ls -A /tests) = test.sh ] && echo 1 > {TEXT} || echo 0 > {TEXT}"
    first, _ = await grade(script)
    await native_sandbox.exec(
        "rm -r /tests; mkdir /tmp/mine; touch /tmp/mine/a; ln -s /tmp/mine /tests"
    )
    second, _ = await grade(script)

    assert (first, second) == ({"reward": 1.0}, {"reward": 1.0})
    assert not await native_sandbox.files.exists("/tmp/mine/test.sh")


async def test_verifier_past_its_deadline_gives_no_verdict(grade: Grade) -> None:
    """A reward that was there before the rest hung is half a verdict, so none."""
    error, verifier = await grade(
        f"echo 1 > {TEXT}; sleep 60", toml="[verifier]\ntimeout_sec = 0.5\n"
    )

    assert isinstance(error, VerifierDeadlineError)
    assert verifier.record().reason == "deadline"


async def test_verifier_leaves_a_service_running_and_lists_it(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """A daemon may be what is graded; who reads the record must know that it was there."""
    await native_sandbox.exec(
        "sleep 1000 > /dev/null 2>&1 & until grep -qx sleep /proc/$!/comm; do :; done"
    )
    verdict, _ = await grade(f"pgrep -x sleep > /dev/null && echo 1 > {TEXT}")

    assert verdict == {"reward": 1.0}
    assert [one.name for one in grade.survivors] == ["sleep"]


async def test_verifier_with_full_kill_runs_alone(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """A task whose reward is a file's content has no use for anything of the agent's alive."""
    await native_sandbox.exec("setsid sleep 1000 > /dev/null 2>&1 &")
    verdict, _ = await grade(
        f"ls /proc | grep -c '^[0-9]' > /dev/null; pgrep -x sleep || echo 1 > {TEXT}",
        toml="[metadata.coldframe]\nfull_kill = true\n",
    )

    assert verdict == {"reward": 1.0}
    assert grade.survivors == ()
    assert grade.killed


async def test_verifier_kills_what_the_harness_still_runs(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """At its deadline an agent's command is in flight; it must not write while tests run."""
    await native_sandbox.start("sleep 1000", operation_id="op-inflight")
    await native_sandbox.start("sleep 2000", operation_id="op-service")
    await grade(f"echo 1 > {TEXT}", running={"op-inflight"})

    left = {one.operation_id for one in grade.survivors}
    assert left == {"op-service"}
    assert grade.killed


async def test_verifier_reward_cannot_be_written_by_another_users_service(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """What an unprivileged agent left running must not reach the log directory."""
    forge = f"while :; do echo 1 > {TEXT}; mv /logs/verifier /logs/mine; done 2> /dev/null"
    await native_sandbox.exec("mkdir /logs; chown nobody /logs")
    await native_sandbox.exec(f"sh -c '{forge}' > /dev/null 2>&1 &", user="nobody")
    error, _ = await grade("sleep 0.3")

    assert isinstance(error, RewardMissingError)
    assert grade.survivors


KNOCK = (
    f"while :; do go=; [ -e /tmp/go ] && go=1; echo 1 > {TEXT}; "
    '[ -z "$go" ] || : > /tmp/knocked; done > /dev/null 2>&1 &'
)
KNOCKED = ": > /tmp/go; until [ -e /tmp/knocked ]; do sleep 0.01; done"
NO_VERDICT = {
    "past its deadline": ("sleep 60", "[verifier]\ntimeout_sec = 1.5\n", VerifierDeadlineError),
    "tests changed": (f"{KNOCKED}; echo >> /tests/test.sh", "", TamperedError),
    "nothing": (KNOCKED, "", RewardMissingError),
}


@pytest.mark.parametrize("case", NO_VERDICT.values(), ids=NO_VERDICT)
async def test_verifier_tells_who_was_refused_although_there_is_no_verdict(
    grade: Grade, native_sandbox: AsyncSandbox, case: tuple[str, str, type[VerifierError]]
) -> None:
    """Who reads the record must learn of the attempt, however grading ended."""
    script, toml, expected = case
    await native_sandbox.exec(KNOCK)
    error, verifier = await grade(script, toml=toml)

    assert type(error) is expected
    assert "reward_refused" in {one.what for one in verifier.tampering.events}


async def test_verifier_runs_although_the_agent_removed_its_directory(
    grade: Grade,
    native_sandbox: AsyncSandbox,
    native_async_client: AsyncSandboxClient,
    tmp_path: Path,
) -> None:
    """Otherwise `rm -rf .` would turn a 0 into a failure that is nobody's."""
    async with await native_async_client.create_sandbox(
        "debian:bookworm", workdir="/srv"
    ) as sandbox:
        await sandbox.exec("rm -rf /srv", cwd="/")
        directory = write_task(tmp_path, "gone")
        recorder = Recorder(BlobStore(tmp_path / "blobs"), Redactor())
        verifier = Verifier(sandbox, load_task(directory).steps[0].verifier, recorder)
        verdict = await verifier.grade()

    assert verdict == {"reward": 1.0}
    assert verifier.record().cwd == "/"


async def test_verifier_runs_as_its_user_with_its_environment(grade: Grade) -> None:
    """A verifier that may not be root says so, and must still be able to write its reward."""
    verdict, verifier = await grade(
        f'[ "$(id -un) $LEVEL" = "nobody 3" ] && echo 1 > {TEXT}',
        toml='[verifier]\nuser = "nobody"\nenv = { LEVEL = "3" }\n',
    )

    assert verdict == {"reward": 1.0}
    assert verifier.record().user == "nobody"


@pytest.mark.parametrize("entry", ["9" * 5000 + ":0", "70000:0", "65534:" + "9" * 5000, "x:y"])
async def test_verifier_whose_user_has_an_id_that_cannot_be_is_typed(
    grade: Grade, native_sandbox: AsyncSandbox, entry: str
) -> None:
    """An agent may have written /etc/passwd; that is no crash, and no fault of the caller's."""
    line = f"nobody:x:{entry}::/:/bin/sh\n"
    await native_sandbox.exec("cat > /etc/passwd", stdin=line.encode(), user=0)
    error, _ = await grade("true", toml='[verifier]\nuser = "nobody"\n')

    assert isinstance(error, VerifierError)
    assert "'nobody'" in str(error)


async def test_verifier_output_is_kept_without_secrets(grade: Grade) -> None:
    """A judge's key in a test's traceback would be published with the trajectory."""
    _, verifier = await grade(f"echo my-judge-key; echo 1 > {TEXT}", secret="my-judge-key")

    record = verifier.record()
    assert record.stdout
    assert verifier.recorder.blobs.get(record.stdout.stored) == b"[redacted]\n"


async def test_verifier_that_cannot_be_started_is_typed(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """An agent that removed the interpreter is not a reward, and not a crash of ours."""
    await native_sandbox.exec("rm /bin/sh /usr/bin/dash")

    error, _ = await grade("true")

    assert isinstance(error, VerifierNotExecutedError)


async def test_verifier_is_run_alone_where_survivors_leave_no_room_for_a_process(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """A fork bomb must turn no 0 into a failure, and least of all into one that is tried again."""
    bomb = "import os, time\nos.setsid()\nwhile True:\n  try:\n    os.fork() or time.sleep(1000)\n"
    bomb += "  except OSError:\n    time.sleep(0.001)\n"
    await native_sandbox.exec(
        f"python3 -c '{bomb}' > /dev/null 2>&1 & "
        "until [ $(ls /proc | grep -c '^[0-9]') -gt 1000 ]; do :; done",
        user="nobody",
    )
    with pytest.raises(NotExecutedError, match="as many processes"):
        for _ in range(100):
            await native_sandbox.exec("true")
    verdict, verifier = await grade(f"echo 0 > {TEXT}")

    assert verdict == {"reward": 0.0}
    assert len(verifier.killed) > 900
    assert verifier.record().removed == ()


async def test_verifier_is_run_again_alone_when_survivors_took_its_processes(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """An agent without privileges must not void its verdict by a bomb that waits for the tests."""
    bomb = (
        "import os, time\nos.setsid()\nwhile not os.path.exists('/tmp/go'):\n  time.sleep(0.01)\n"
        "try:\n  while os.fork():\n    pass\nexcept OSError:\n  open('/tmp/full', 'w')\n"
        "time.sleep(1000)\n"
    )
    await native_sandbox.exec(f'python3 -c "{bomb}" > /dev/null 2>&1 &', user="nobody")
    script = ": > /tmp/go; while [ ! -e /tmp/full ]; do :; done"
    verdict, verifier = await grade(f"{script}; (echo 0) > {TEXT}")

    assert verdict == {"reward": 0.0}
    assert verifier.record().again


KEYS = '[metadata.coldframe]\nkey_inputs = ["/srv/tree", "/srv/file", "/srv/absent"]\n'
CHANGES = {
    "test.sh": "echo >> /tests/test.sh",
    "test.sh replaced": "cp /tests/test.sh /t; mv /t /tests/test.sh; echo >> /tests/test.sh",
    "test.sh removed": "rm /tests/test.sh",
    "tests replaced by a link": "mv /tests /t; ln -s /t /tests",
    "key file": "echo more >> /srv/file",
    "key file's mode": "chmod 600 /srv/file",
    "key file replaced by a link": "mv /srv/file /srv/f; ln -s f /srv/file",
    "file in a key tree": "echo more >> /srv/tree/a/b",
    "new file in a key tree": "touch /srv/tree/a/c",
    "key that was absent": "mkfifo /srv/absent",
}


async def test_verdict_whose_tests_or_key_inputs_were_changed_is_void_and_told(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """What is judged by a program that was changed while it ran is not judged."""
    for name, change in CHANGES.items():
        await native_sandbox.exec(
            "rm -rf /srv/* /t; mkdir -p /srv/tree/a; echo x | tee /srv/file > /srv/tree/a/b"
        )
        error, verifier = await grade(f"{change}; echo 1 > {TEXT}", toml=KEYS)

        assert isinstance(error, TamperedError), name
        events = verifier.tampering.events
        assert events, name
        assert all(one.voided for one in events), name
        assert {one.what for one in events} == {
            "key_input_changed" if "key" in name else "tests_changed"
        }, name


async def test_verdict_stands_when_the_verifier_only_leaves_caches(
    grade: Grade, native_sandbox: AsyncSandbox
) -> None:
    """The control: new files among the tests, reads of inputs, and equal content are no change."""
    await native_sandbox.exec("mkdir -p /srv/tree; echo x > /srv/file")
    verdict, verifier = await grade(
        "mkdir /tests/__pycache__; touch /tests/out; cat /srv/file; echo x > /srv/file; "
        f"echo 1 > {TEXT}",
        toml=KEYS,
    )

    assert verdict == {"reward": 1.0}
    assert verifier.tampering.events == []
    record = verifier.record()
    assert record.tests is not None
    assert record.key_inputs["/srv/absent"] == "absent"


async def test_reward_under_two_names_is_refused(grade: Grade) -> None:
    """Whoever holds the other name may write it."""
    error, _ = await grade(f"echo 1 > {TEXT}.r; ln {TEXT}.r {TEXT}")

    assert isinstance(error, RewardInvalidError)


async def test_whoever_test_sh_leaves_behind_cannot_write_the_reward(grade: Grade) -> None:
    """What runs on without test.sh may be the agent's, and test.sh has said its word."""
    orphaned = 'until [ "$(cut -d" " -f4 /proc/$$/stat)" = 1 ]; do :; done'
    verdict, verifier = await grade(
        f"echo 0 > {TEXT}; "
        f"(sh -c '{orphaned}; while :; do echo 1 > {TEXT}; : > /tmp/up; done' > /dev/null 2>&1 &); "
        "until [ -e /tmp/up ]; do sleep 0.01; done"
    )

    assert verdict == {"reward": 0.0}
    assert {one.what for one in verifier.tampering.events} == {"reward_refused"}


async def test_reward_counts_for_nothing_where_more_was_opened_than_could_be_judged(
    grade: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever floods the node with files must not get past it."""
    monkeypatch.setattr(guard, "MOST_WAITING", -1)
    error, _ = await grade(f"echo 1 > {TEXT}")

    assert isinstance(error, RewardUnvouchedError)


async def test_verifier_waits_for_no_removal_of_what_lies_in_its_places(
    grade: Grade, native_sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million files would else outlast all of the time for grading."""
    monkeypatch.setattr(places, "REMOVE_S", 0.01)
    await native_sandbox.exec("mkdir /tests; cd /tests; seq 30000 | xargs touch")
    verdict, _ = await grade(f"echo 0 > {TEXT}")
    left = [one.name for one in await native_sandbox.files.list("/")]

    assert verdict == {"reward": 0.0}
    assert any(name.startswith(b".tests-") for name in left)


async def test_key_inputs_that_take_for_ever_to_read_are_the_agents_doing(
    grade: Grade, native_sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse files cost nothing, and hours to read."""
    monkeypatch.setattr(integrity, "KEY_INPUTS_S", 0.2)
    await native_sandbox.exec("mkdir /key; for i in $(seq 100); do truncate -s 1G /key/$i; done")

    with pytest.raises(GradingPreventedError, match="/key: a key input"):
        await grade(f"echo 0 > {TEXT}", toml='[metadata.coldframe]\nkey_inputs = ["/key"]\n')


async def test_verifier_that_cannot_be_guarded_for_what_lives_kills_that_and_grades(
    grade: Grade, native_sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A want of descriptors passes, so it is tried again with a new agent: a second chance."""
    begin = guard_mount.begin

    def wanting(site: Site, target: int, wanted: Wanted) -> guard.Guard:
        if wanted.others:
            raise OSError(errno.EMFILE, "no descriptor is left")
        return begin(site, target, wanted)

    monkeypatch.setattr(guard_mount, "begin", wanting)
    await native_sandbox.exec("sleep 600 > /dev/null 2>&1 &")
    verdict, verifier = await grade(f"echo 0 > {TEXT}")

    assert verdict == {"reward": 0.0}
    assert verifier.record().guarded
    assert [one.name for one in verifier.killed] == ["sleep"]
