"""Requests, namespaces, the waiting queue and deadlines."""

import pytest

from loraserve.errors import InvalidRequest
from loraserve.sampling import SamplingParams
from loraserve.scheduler.deadlines import Deadlines
from loraserve.scheduler.queue import WaitingQueue
from loraserve.scheduler.request import AdapterUse, Request, namespace_of, namespace_uses, overlays_of

A, B = AdapterUse("aaaa", 1.0), AdapterUse("bbbb", 0.5)


def make(name: str, **more: object) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), **more)  # type: ignore[arg-type]


def test_everything_that_changes_the_kv_changes_the_namespace() -> None:
    different = [
        namespace_of(()),
        namespace_of((A,)),
        namespace_of((B,)),
        namespace_of((A._replace(scale=2.0),)),
        namespace_of((A, B)),
        namespace_of((A._replace(scale=0.5), B._replace(scale=1.0))),
        namespace_of((), "salt"),
        namespace_of((A,), "salt"),
        namespace_of((), "aaaa*1.0"),
        namespace_of((), "|aaaa*1.0"),
    ]
    assert len(set(different)) == len(different)
    assert all(different)


def test_what_starts_later_is_no_part_of_the_namespace_but_overlays_it() -> None:
    late, later = A._replace(start=3), B._replace(start=4)
    assert namespace_of((late,), "salt") == namespace_of((), "salt")
    assert namespace_of((A, later)) == namespace_of((A,))
    assert overlays_of((A, B)) == ()
    assert overlays_of((later, late)) == ((3, "aaaa*1.0"), (4, "bbbb*0.5"))
    assert make("r", adapters=(A, later)).overlays == overlays_of((later,))
    assert namespace_uses(overlays_of((late,))[0][1], "aaaa")
    with pytest.raises(InvalidRequest):
        namespace_of((AdapterUse("a*b", 1.0, 5),))


def test_what_does_not_change_the_kv_does_not_change_the_namespace() -> None:
    assert namespace_of((A, B)) == namespace_of((B, A))
    assert namespace_of((AdapterUse("aaaa", 1),)) == namespace_of((A,))
    assert make("r", adapters=(A,)).namespace == namespace_of((A,))
    assert make("r", adapters=(A,), namespace="own").namespace == "own"


def test_versions_are_found_in_namespaces_but_not_in_salts() -> None:
    blend = namespace_of((A, B), "cccc*1.0")
    assert namespace_uses(blend, "aaaa")
    assert namespace_uses(blend, "bbbb")
    assert not namespace_uses(blend, "cccc")
    assert not namespace_uses(blend, "aaa")
    assert not namespace_uses(namespace_of((), "aaaa"), "aaaa")


@pytest.mark.parametrize("use", [("", 1.0), ("a*b", 1.0), ("a+b", 1.0), ("a|b", 1.0), ("a", float("nan"))])
def test_uses_that_make_no_key_are_refused(use: tuple[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        namespace_of((AdapterUse(*use),))


def test_tokens_and_versions() -> None:
    request = make("r", adapters=(A, B, A._replace(scale=3.0)))
    assert request.versions == ("aaaa", "bbbb")
    request.output += [7, 8]
    assert request.token_ids().tolist() == [1, 2, 3, 7, 8]
    assert (request.num_prompt, request.num_tokens) == (3, 5)
    assert request.is_prefilling
    request.num_computed = 3
    assert not request.is_prefilling


def test_queue_puts_retracted_requests_first_by_rank() -> None:
    queue = WaitingQueue()
    requests = {name: make(name, order=i) for i, name in enumerate("abcde")}
    requests["d"].priority = -1
    for name in "ace":
        queue.add(requests[name])
    queue.put_back(requests["b"])
    queue.put_back(requests["d"])
    assert [r.id for r in queue] == list("dbace")
    assert len(queue) == 5
    assert requests["b"] in queue
    queue.remove(requests["b"])
    queue.remove(requests["c"])
    assert [r.id for r in queue] == list("dae")
    with pytest.raises(KeyError):
        queue.remove(requests["b"])
    with pytest.raises(AssertionError, match="waits already"):
        queue.put_back(requests["a"])


def test_deadlines_come_up_once_and_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for i in range(300):
        deadlines.add(make(f"r{i}", deadline=float(i)))
    assert deadlines.expired(1.0) == ["r0", "r1"]
    assert deadlines.expired(1.5) == []
    alive = {f"r{i}": make(f"r{i}", deadline=float(i)) for i in (50, 60)}
    deadlines.prune(alive)
    assert len(deadlines) == 2
    assert deadlines.expired(1000.0) == ["r50", "r60"]
