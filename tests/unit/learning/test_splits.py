"""Splits by group: the same everywhere, frozen, and seen to stay apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldframe.cli.main import main
from coldframe.learning.splits import (
    CorpusTask,
    SplitError,
    SplitManifest,
    SplitPlan,
    make_splits,
    overlaps,
    read_corpus_task,
    read_manifest,
    write_manifests,
)
from coldframe.learning.splits.similarity import likeness, sketch
from coldframe.protocol.errors import InvalidRequestError

SHARES = {"train": 0.8, "eval": 0.2}


def corpus_task(key: str, group: str, **changes: Any) -> CorpusTask:
    """Return a task that has nothing in common with others but its group."""
    base: dict[str, Any] = {
        "directory": Path("/tasks") / key,
        "name": f"org/{key}",
        "digest": key,
        "metadata": {"template": group},
        "instruction": (" ".join(f"{key}{at}" for at in range(40)),),
        "tests": (" ".join(f"check{key}{at}" for at in range(40)),),
    }
    return CorpusTask(**base | changes)


def manifest(name: str, *tasks: CorpusTask, by: str = "template") -> SplitManifest:
    """Return a split with these tasks."""
    entries = tuple(task.entry(by) for task in tasks)
    return SplitManifest(name=name, by=by, seed="0", shares=SHARES, tasks=entries)


def _homes(splits: tuple[SplitManifest, ...]) -> dict[str, str]:
    return {task.key: split.name for split in splits for task in split.tasks}


# --- groups ---


def test_task_without_the_group_is_told_what_all_of_them_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of the shipped tasks none has a repository; `--by task` splits them all the same."""
    tasks = Path(__file__).parents[3] / "examples" / "tasks"

    assert main(["splits", "make", str(tasks), "--by", "repository", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "repository is not said" in told
    assert "tasks say: " in told
    assert "--by task" in told
    assert main(["splits", "make", str(tasks), "--by", "task", "--out", str(tmp_path)]) == 0
    found = [read_manifest(tmp_path / f"{name}.json") for name in ("train", "eval")]
    assert all(one.tasks for one in found)
    assert all(len({task.group for task in one.tasks}) == len(one.tasks) for one in found)


# --- make -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.text("0123456789", max_size=3),
)
def test_split_is_the_same_in_any_order_and_keeps_groups_whole(
    groups: list[str], random: Any, seed: str
) -> None:
    """Two machines that split one corpus must not train on each other's eval tasks."""
    tasks = [corpus_task(f"t{at}", group) for at, group in enumerate(groups)]
    plan = SplitPlan("template", SHARES, seed)
    shuffled = random.sample(tasks, len(tasks))

    try:
        made = make_splits(tasks, plan)
    except SplitError as error:
        assert "would have none" in str(error)
        return
    assert make_splits(shuffled, plan) == made
    homes = _homes(made)
    assert set(homes) == {task.directory.name for task in tasks}
    where = {(group, homes[f"t{at}"]) for at, group in enumerate(groups)}
    assert len(where) == len(set(groups))


def test_tasks_that_come_later_move_none_that_were_there() -> None:
    """Else every new task would leak old ones from eval into train."""
    plan = SplitPlan("template", SHARES)
    old = [corpus_task(f"t{at}", f"g{at}") for at in range(40)]
    new = [corpus_task(f"n{at}", f"h{at}") for at in range(40)]

    before, after = _homes(make_splits(old, plan)), _homes(make_splits(old + new, plan))

    assert after == after | before
    assert {"train", "eval"} == set(before.values())


def test_shares_are_kept_over_many_groups() -> None:
    """A share is of groups: 2,000 of them come within three standard deviations."""
    plan = SplitPlan("template", {"train": 0.7, "dev": 0.1, "eval": 0.2})
    homes = [plan.split_of(f"g{at}") for at in range(2000)]

    for name, share in plan.shares.items():
        spread = (2000 * share * (1 - share)) ** 0.5
        assert abs(homes.count(name) - 2000 * share) < 3 * spread


def test_split_by_time_puts_what_came_later_behind_the_cut() -> None:
    """A model must not be graded on what is older than what it learnt from."""
    times = ["2024-12-31", "2025-01-01T00:30:00+02:00", "2025-01-01", "2025-06-01T10:00:00Z"]
    tasks = [corpus_task(f"t{at}", "", metadata={"time": one}) for at, one in enumerate(times)]

    made = make_splits(tasks, SplitPlan("time", SHARES, cut="2025-01-01"))

    assert _homes(made) == {"t0": "train", "t1": "train", "t2": "eval", "t3": "eval"}


@pytest.mark.parametrize(
    "other",
    [
        "git@example.org:team/tool.git",
        "git@example.org:/team/tool.git",
        "https://example.org//team/tool",
        "https://Example.org/Team/tool/",
        "ssh://git@example.org:22/team/tool",
        "example.org/team/tool",
    ],
)
def test_repository_is_one_group_however_it_is_written(other: str) -> None:
    """Two spellings of one repository would land on both sides."""
    first = corpus_task("a", "", metadata={"repository": "https://example.org/team/tool.git"})
    second = corpus_task("b", "", metadata={"repository": other})

    assert first.group("repository") == second.group("repository") == "example.org/team/tool"


@pytest.mark.parametrize("value", [None, "", " ", True, ["a"], 1.5])
def test_task_that_does_not_say_its_group_is_refused_by_name(value: Any) -> None:
    """A group that is guessed is a leak that is not seen."""
    with pytest.raises(SplitError, match=r"/tasks/sum/task\.toml: \[metadata\] template"):
        make_splits(
            [corpus_task("sum", "", metadata={"template": value})], SplitPlan("template", SHARES)
        )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (SplitPlan("template", {"train": 1.0}), "two splits or more"),
        (SplitPlan("template", {"train": 0.5, "eval": 0.4}), "add up to 0.9"),
        (SplitPlan("template", {"train": float("nan"), "eval": 0.4}), "between 0 and 1"),
        (SplitPlan("template", {"train": 1.2, "eval": -0.2}), "between 0 and 1"),
        (SplitPlan("time", SHARES), "go together"),
        (SplitPlan("template", SHARES, cut="2025-01-01"), "go together"),
        (SplitPlan("time", SHARES, cut="soon"), "'soon' is no date"),
        (SplitPlan("time", {"a": 0.5, "b": 0.3, "c": 0.2}, cut="2025-01-01"), "two parts"),
    ],
)
def test_plan_that_is_none_is_refused(plan: SplitPlan, words: str) -> None:
    """Before anything is written."""
    tasks = [corpus_task("t", "g", metadata={"template": "g", "time": "2025-01-01"})]

    with pytest.raises(SplitError, match=words):
        make_splits(tasks, plan)


# --- likeness -------------------------------------------------------------------------


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_likeness_of_small_texts_is_exact(one: set[int], two: set[int]) -> None:
    """A sketch of a set of at most 128 is the set."""
    left, right = (tuple(sorted(values)) for values in (one, two))
    due = len(one & two) / len(one | two) if one and two else 0.0

    assert likeness(left, right) == due
    assert likeness(right, left) == due


def test_likeness_of_large_texts_is_near_the_truth() -> None:
    """128 samples are within 0.11 of the truth nineteen times in twenty; these are fixed."""
    words = [f"w{at}" for at in range(4000)]
    for shared in (0.3, 0.6, 0.8, 0.95):
        size = int(2000 * 2 / (1 + shared))
        start = int(size - shared * 2 * size / (1 + shared))
        one, two = words[:size], words[start : start + size]
        found = likeness(sketch([" ".join(one)]), sketch([" ".join(two)]))
        assert abs(found - shared) < 0.11


def test_sketch_does_not_see_case_spacing_or_forms_of_letters() -> None:
    """They make no other task."""
    plain = "Write a program that adds two numbers"

    assert sketch([plain]) == sketch(
        ["WRITE  a\nprogram, that adds \N{FULLWIDTH LATIN SMALL LETTER T}wo numbers!"]
    )
    assert sketch(["Write"]) == sketch(["write"]) != ()
    assert sketch(["", "..."]) == ()


# --- overlaps -------------------------------------------------------------------------

BASE = corpus_task("sum-two", "g1")
LONG = " ".join(f"word{at}" for at in range(100))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key: corpus_task("Sum_Two", "g2", digest="x"), "the same key: sum-two"),
        (lambda key: corpus_task(key, "g2", name="other/sum two"), "the same key: sum-two"),
        (lambda key: corpus_task(key, "g2", digest="sum-two"), "the same content: sum-two"),
        (lambda key: corpus_task(key, "g1"), "the same template: g1"),
        (
            lambda key: corpus_task(key, "g2", instruction=(BASE.instruction[0].upper(),)),
            "instruction nearly the same: 1.00",
        ),
        (
            lambda key: corpus_task(key, "g2", tests=(BASE.tests[0] + " more",)),
            "tests nearly the same: 0.99",
        ),
    ],
)
def test_what_two_splits_have_in_common_is_found_and_both_sides_are_named(
    change: Callable[[str], CorpusTask], reason: str
) -> None:
    """A copy under another name is how evaluation tasks come into training."""
    train = manifest("train", BASE, corpus_task("far", "g8"))
    other = manifest("eval", corpus_task("away", "g9"), change("different"))

    (found,) = overlaps({"a/train.json": train, "b/eval.json": other})

    assert found.left == ("a/train.json", "sum-two")
    assert found.right[0] == "b/eval.json"
    assert found.reasons == (reason,)


def test_splits_that_are_apart_have_no_overlap() -> None:
    """The control; likeness below the threshold is none."""
    one = corpus_task("one", "g1", instruction=(LONG,))
    half = " ".join(LONG.split()[:50] + [f"other{at}" for at in range(50)])
    two = corpus_task("two", "g2", instruction=(half,))
    splits = {"train": manifest("train", one), "eval": manifest("eval", two)}

    assert overlaps(splits) == ()
    assert len(overlaps(splits, threshold=0.2)) == 1
    with pytest.raises(SplitError):
        overlaps(splits, threshold=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_pair_that_is_nearly_the_same_is_passed_over(data: st.DataObject) -> None:
    """Not every pair is looked at; those that are left out must have nothing in common."""
    words = st.lists(st.integers(0, 12), min_size=1, max_size=40)

    def tasks(side: str) -> list[CorpusTask]:
        texts = data.draw(st.lists(words, min_size=1, max_size=4))
        return [
            corpus_task(f"{side}{at}", f"{side}{at}", instruction=(" ".join(map(str, text)),))
            for at, text in enumerate(texts)
        ]

    left, right = tasks("left"), tasks("right")
    threshold = data.draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    splits = {"train": manifest("train", *left), "eval": manifest("eval", *right)}

    found = {(one.left[1], one.right[1]) for one in overlaps(splits, threshold=threshold)}
    assert found == {
        (one.directory.name, two.directory.name)
        for one in left
        for two in right
        if likeness(sketch(one.instruction), sketch(two.instruction)) >= threshold
    }


def test_pair_at_the_threshold_itself_is_found() -> None:
    """0.55 times 100 is more than 55, as floats go."""
    one = corpus_task("a", "a").entry("template").model_copy(update={"instruction": (*range(100),)})
    two = corpus_task("b", "b").entry("template").model_copy(update={"instruction": (*range(55),)})
    splits = {
        task.key: manifest(task.key).model_copy(update={"tasks": (task,)}) for task in (one, two)
    }

    (found,) = overlaps(splits, threshold=0.55)
    assert found.reasons == ("instruction nearly the same: 0.55",)


def test_time_that_no_other_zone_knows_is_refused_by_name() -> None:
    """It was an error of arithmetic, and named no task."""
    task = corpus_task("a", "", metadata={"time": "0001-01-01T00:00:00+14:00"})
    with pytest.raises(SplitError, match=r"/tasks/a/task\.toml: .* is no date"):
        task.group("time")


def test_every_pair_of_splits_is_compared() -> None:
    """Three manifests are three comparisons."""
    splits = {name: manifest(name, BASE) for name in ("train", "dev", "eval")}

    pairs = {(one.left[0], one.right[0]) for one in overlaps(splits)}
    assert pairs == {("train", "dev"), ("train", "eval"), ("dev", "eval")}


# --- manifests ------------------------------------------------------------------------


def test_manifest_is_frozen_and_one_that_was_edited_is_refused(tmp_path: Path) -> None:
    """Moving a task by hand would be seen by nobody."""
    path = tmp_path / "train.json"
    made = manifest("train", BASE, corpus_task("far", "g8"))
    write_manifests({path: made})
    write_manifests({path: made})

    assert path.stat().st_mode & 0o777 == 0o444
    assert read_manifest(path) == made
    content = json.loads(path.read_bytes())
    del content["split"]["tasks"][0]
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(content))
    with pytest.raises(SplitError, match="changed after it was frozen"):
        read_manifest(edited)


NOT_FINITE = '{"split": {"name": "a", "by": "x", "seed": "", "shares": {"a": NaN}, "tasks": []}}'


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"split": {}, "digest": ""}', NOT_FINITE, "[" * 99_999]
)
def test_file_that_is_no_manifest_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """One sentence, with the file."""
    path = tmp_path / "x.json"
    path.write_text(content)

    for one in (path, tmp_path / "absent.json"):
        with pytest.raises(SplitError, match=str(one)):
            read_manifest(one)


# --- the command line -----------------------------------------------------------------


def _write_task(parent: Path, key: str, group: str, instruction: str | None = None) -> Path:
    directory = parent / key
    (directory / "tests").mkdir(parents=True)
    (directory / "task.toml").write_text(
        f'[task]\nname = "o/{key}"\n[metadata]\ntemplate = "{group}"\n'
    )
    text = instruction or " ".join(f"{key}{at}" for at in range(30))
    (directory / "instruction.md").write_text(text)
    (directory / "tests" / "test.sh").write_text(f"#!/bin/sh\necho {key}\n")
    return directory


def test_command_makes_splits_that_its_check_finds_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made twice they are the same files; with another seed they are refused, not written over."""
    for at in range(12):
        _write_task(tmp_path / "tasks", f"t{at}", f"g{at % 6}")
    out = tmp_path / "splits"
    command = ["splits", "make", str(tmp_path / "tasks"), "--by", "template", "--out", str(out)]
    command += ["--split", "train=0.5", "--split", "eval=0.5"]

    assert main(command) == 0
    first = {one.name: one.read_bytes() for one in out.iterdir()}
    assert main(command) == 0
    assert {one.name: one.read_bytes() for one in out.iterdir()} == first
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["splits"]
    assert {one["path"] for one in told.values()} == {str(path) for path in out.iterdir()}
    assert sum(one["tasks"] for one in told.values()) == 12
    assert set(first) == {"train.json", "eval.json"}
    pair = [str(out / "train.json"), str(out / "eval.json")]
    assert main(["splits", "check", *pair]) == 0
    assert "0 overlaps" in capsys.readouterr().out

    assert main([*command, "--seed", "1"]) == 2
    assert "frozen with other content" in capsys.readouterr().err


def test_splits_are_frozen_together_or_not_at_all(tmp_path: Path) -> None:
    """One of today's beside one of yesterday's might share tasks, and nobody would look."""
    train, held = tmp_path / "train.json", tmp_path / "eval.json"
    write_manifests({held: manifest("eval", BASE)})

    with pytest.raises(InvalidRequestError, match=r"eval\.json: is frozen with other content"):
        write_manifests(
            {train: manifest("train", BASE), held: manifest("eval", corpus_task("b", "g2"))}
        )

    assert not train.exists()


def test_command_writes_nothing_where_near_copies_fall_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group key that misses a copy is found out before anything is frozen."""
    plan = SplitPlan("template", {"train": 0.5, "eval": 0.5})
    homes = {plan.split_of(f"g{at}"): f"g{at}" for at in range(20)}
    for split, group in homes.items():
        _write_task(tmp_path / "tasks", f"in-{split}", group, LONG)
    out = tmp_path / "splits"
    command = ["splits", "make", str(tmp_path / "tasks"), "--by", "template", "--out", str(out)]

    assert main([*command, "--split", "train=0.5", "--split", "eval=0.5"]) == 1
    said = capsys.readouterr().out
    assert "train: in-train" in said
    assert "eval: in-eval" in said
    assert not out.exists()


def test_check_exits_with_1_for_an_overlap_and_2_for_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI stops at either."""
    files = [str(tmp_path / name) for name in ("train.json", "eval.json")]
    write_manifests({Path(files[0]): manifest("train", BASE)})
    copy = corpus_task("copy", "g2", digest="sum-two")
    write_manifests({Path(files[1]): manifest("eval", copy)})

    assert main(["splits", "check", *files, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["overlaps"]
    assert found["left"] == [files[0], "sum-two"]
    assert found["right"] == [files[1], "copy"]
    assert main(["splits", "check", files[0]]) == 2
    assert main(["splits", "check", files[0], files[0]]) == 2
    assert main(["splits", "check", files[0], str(tmp_path / "absent")]) == 2


def test_task_of_steps_is_read_with_all_its_instructions_and_tests(tmp_path: Path) -> None:
    """A copy of one step alone would not be seen otherwise; links lead nowhere."""
    task = _write_task(tmp_path, "steps", "g")
    (task / "instruction.md").unlink()
    for name in ("one", "two"):
        step = task / "steps" / name
        (step / "tests").mkdir(parents=True)
        (step / "instruction.md").write_text(f"do {name}")
        (step / "tests" / "grade.py").write_bytes(f"grade {name}".encode() + b"\xff")
    (task / "tests" / "link").symlink_to("/etc/passwd")

    found = read_corpus_task(task, "d")

    assert found.instruction == ("do one", "do two")
    assert [text[:9] for text in found.tests] == ["#!/bin/sh", "grade one", "grade two"]


def test_directory_that_is_no_task_is_refused_by_name(tmp_path: Path) -> None:
    """As is one without an instruction."""
    with pytest.raises(SplitError, match=r"task\.toml"):
        read_corpus_task(tmp_path, "d")
    (tmp_path / "task.toml").write_text("x = ")
    with pytest.raises(SplitError, match="not TOML"):
        read_corpus_task(tmp_path, "d")
    (tmp_path / "task.toml").write_text("")
    with pytest.raises(SplitError, match=r"no instruction\.md"):
        read_corpus_task(tmp_path, "d")
