"""Wire: frames arrive whole, secrets are asked, a lost peer answers everything outstanding."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest

from cluster.wire import Link, ReplicaLost, pack
from tests.unit.fake_replica import FakeReplica


@pytest.fixture
def replica():
    fake = FakeReplica()
    yield fake
    fake.close()


def submit(link: Link, tokens: int, output: int = 1) -> tuple[threading.Event, list]:
    done, box = threading.Event(), []
    header = {"do": "generate", "id": "x", "output_tokens": output}

    def keep(reply):
        box.append(reply)
        done.set()

    link.submit(header, np.arange(tokens, dtype=np.int32), keep)
    return done, box


def test_every_call_gets_its_own_answer(replica):
    calls = [submit(replica.link, n, output=n + 100) for n in range(1, 60)]
    for n, (done, box) in enumerate(calls, 1):
        assert done.wait(10)
        assert box[0]["output_tokens"] == n + 100
    assert sorted(replica.seen) == list(range(1, 60))


def test_without_the_secret_nothing_is_served(replica):
    stranger = Link("127.0.0.1", replica.port, "guess")
    with pytest.raises(ReplicaLost):
        stranger.ask({"do": "clock"}, timeout=10)
    assert replica.link.ask({"do": "clock"})["clock"] > 0


def test_a_frame_beyond_the_limit_ends_the_connection(replica):
    with socket.create_connection(("127.0.0.1", replica.port)) as raw:
        raw.settimeout(10)
        raw.sendall(pack({"secret": "secret"}))
        raw.sendall(struct.pack("<II", 2**31, 2**31))
        assert raw.recv(1) == b""


def test_a_port_that_is_not_there_is_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ReplicaLost, match=f"replica at 127.0.0.1:{port}: "):
        Link("127.0.0.1", port, "secret")


def test_losing_the_peer_answers_everything_outstanding():
    fake = FakeReplica(service=60.0)
    calls = [submit(fake.link, 5) for _ in range(4)]
    fake.link.close()
    for done, box in calls:
        assert done.wait(10)
        assert isinstance(box[0], ReplicaLost)
    with pytest.raises(ReplicaLost):
        submit(fake.link, 5)
    fake.close()


def test_one_machine_has_one_clock(replica):
    offset, error = replica.link.clock_offset()
    assert abs(offset) <= error
