"""The spool on a real disk and the sender with its manners."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_agent.backoff import Backoff
from gpu_agent.spool import Answer, Sender, Spool

from .conftest import REPOSITORY


class Hands:
    """A clock one sets by hand."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def spool_at(folder: Path, *, bytes_max: int = 1000, clock: Hands | None = None) -> Spool:
    return Spool(folder, bytes_max=bytes_max, age_s_max=60, now=clock or Hands())


def bodies(spool: Spool) -> list[bytes]:
    """All bodies in the order they would be sent."""
    found = []
    while (item := spool.newest(timeout_s=0)) is not None:
        found.append(item[1])
        spool.done(item[0])
    return found


def test_the_newest_is_sent_first_and_all_survive_a_restart(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    ids = [spool.put(b"one"), spool.put(b"two")]
    again = spool_at(tmp_path)
    assert again.depth()[:2] == (2, 6)
    again.put(b"three")
    newest = again.newest(timeout_s=0)
    assert newest is not None
    assert newest[0].batch_id not in ids
    assert bodies(again) == [b"three", b"two", b"one"]
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_leaves_when_the_bytes_are_used_up(tmp_path: Path) -> None:
    spool = spool_at(tmp_path, bytes_max=10)
    for body in (b"aaaa", b"bbbb", b"cccc"):
        spool.put(body)
    assert spool.dropped == {"spool full": 1}
    assert spool.bytes == 8
    spool.put(b"x" * 11)
    assert spool.dropped["batch larger than the spool allows"] == 1
    assert bodies(spool) == [b"cccc", b"bbbb"]


def test_what_is_too_old_leaves(tmp_path: Path) -> None:
    clock = Hands()
    spool = spool_at(tmp_path, clock=clock)
    spool.put(b"old")
    clock.now_s += 30
    spool.put(b"new")
    assert spool.depth()[2] == 30
    clock.now_s += 31
    assert bodies(spool) == [b"new"]
    assert spool.dropped == {"older than the spool allows": 1}


def test_a_torn_tail_is_swept_away(tmp_path: Path) -> None:
    spool_at(tmp_path).put(b"whole")
    (tmp_path / "000000000002-1000000000-aa.torn").write_bytes(b"ha")
    (tmp_path / "000000000003-1000000000-bb.otlp").write_bytes(b"")
    spool = spool_at(tmp_path)
    assert bodies(spool) == [b"whole"]
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from gpu_agent.spool import Spool
spool = Spool(Path(sys.argv[1]), bytes_max=10**9, age_s_max=3600)
while True:
    body = str(spool._sequence).encode() * 5000
    spool.put(body)
    print(len(body), flush=True)
"""


@pytest.mark.processes
def test_kill_9_in_the_middle_loses_nothing_that_was_put(tmp_path: Path) -> None:
    put = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            for _ in range(random.randint(1, 20)):
                writer.stdout.readline()
                put += 1
            writer.send_signal(signal.SIGKILL)
            put += len(writer.stdout.readlines())
    spool = Spool(tmp_path, bytes_max=10**9, age_s_max=3600)
    found = bodies(spool)
    # One batch per kill may be on disk without its number having been printed.
    assert put <= len(found) <= put + 3
    for body in found:
        assert body == body[: len(body) // 5000] * 5000


class Receiver:
    """Answers as told, remembers what came."""

    def __init__(self, *answers: Answer | OSError) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[bytes, dict[str, str]]] = []

    def __call__(self, body: bytes, headers: dict[str, str]) -> Answer:
        self.seen.append((body, headers))
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def send_once(spool: Spool, sender: Sender) -> float:
    found = sender.next(timeout_s=0)
    assert found is not None
    return sender.send(*found)


def test_what_is_taken_leaves_the_spool(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    batch_id = spool.put(b"body")
    receiver = Receiver(Answer(200))
    assert send_once(spool, Sender(spool, receiver, token="t0ken")) == 0
    assert receiver.seen == [
        (
            b"body",
            {
                "Content-Type": "application/x-protobuf",
                "Content-Encoding": "gzip",
                "Authorization": "Bearer t0ken",
                "X-Batch-Id": batch_id,
            },
        )
    ]
    assert spool.depth() == (0, 0, 0.0)


@pytest.mark.parametrize("answer", [Answer(429), Answer(503), Answer(500), OSError("refused")])
def test_what_may_pass_later_stays_with_the_same_batch_id(
    tmp_path: Path, answer: Answer | OSError
) -> None:
    spool = spool_at(tmp_path)
    spool.put(b"body")
    receiver = Receiver(answer, Answer(200))
    sender = Sender(spool, receiver, token="t")
    assert 0 <= send_once(spool, sender) <= 1.0
    assert sender.standing.state == "bad"
    send_once(spool, sender)
    assert len({headers["X-Batch-Id"] for _, headers in receiver.seen}) == 1
    assert sender.standing.state == "good"
    assert spool.dropped == {}


def test_retry_after_wins_over_the_backoff(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.put(b"body")
    sender = Sender(spool, Receiver(Answer(429, retry_after_s=17.0)), token="t")
    assert send_once(spool, sender) == 17.0


@pytest.mark.parametrize("status", [400, 401, 413, 301])
def test_what_will_never_pass_is_dropped_and_counted(tmp_path: Path, status: int) -> None:
    spool = spool_at(tmp_path)
    spool.put(b"body")
    sender = Sender(spool, Receiver(Answer(status, b"why")), token="t")
    assert send_once(spool, sender) == 0
    assert spool.dropped == {f"HTTP {status}": 1}
    assert sender.standing.error == f"HTTP {status}"


def test_points_the_receiver_refused_are_counted(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.put(b"body")
    sender = Sender(
        spool, Receiver(Answer(200, b"..")), token="t", rejected_points=lambda body: (3, "too old")
    )
    send_once(spool, sender)
    assert sender.points_rejected == 3


def test_backoff_is_full_jitter_up_to_its_cap() -> None:
    backoff = Backoff(base_s=1.0, cap_s=60.0)
    waits = [backoff.fail() for _ in range(200)]
    assert all(wait <= min(60.0, 2.0**n) for n, wait in enumerate(waits))
    assert max(waits) > 30
    assert min(waits[10:]) < 15
    backoff.succeed()
    assert backoff.fail() <= 1.0


def test_limits_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 0 bytes and 60 s, allowed: both above 0"):
        Spool(tmp_path, bytes_max=0, age_s_max=60)


def test_a_batch_the_receiver_chokes_on_does_not_hold_up_the_older_ones(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    for body in (b"oldest", b"older", b"poison"):
        spool.put(body)

    def receiver(body: bytes, headers: dict[str, str]) -> Answer:
        seen.append(body)
        return Answer(500 if body == b"poison" else 200)

    seen: list[bytes] = []
    sender = Sender(spool, receiver, token="t")
    for _ in range(5):
        send_once(spool, sender)
    assert seen == [b"poison"] * 3 + [b"older", b"oldest"]
    spool.put(b"new")
    for _ in range(5):
        send_once(spool, sender)
    assert seen[5:] == [b"new"] + [b"poison"] * 4
    assert spool.depth()[0] == 1
