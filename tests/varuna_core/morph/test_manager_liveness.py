"""When a node gives up a manager that fell silent."""

from __future__ import annotations

from varuna_core.morph.node_daemon import GAP_S, ManagerLiveness


def hear(liveness: ManagerLiveness, beats: list[float | None], every_s: float = 1.0) -> list[bool]:
    found = []
    now = 100.0
    for beat in beats:
        now += every_s
        found.append(liveness.is_lost(beat, now))
    return found


def test_a_manager_that_beats_is_never_lost() -> None:
    assert not any(hear(ManagerLiveness(30.0), [float(k // 20) for k in range(400)]))


def test_one_that_fell_silent_is_lost_after_the_limit() -> None:
    liveness = ManagerLiveness(40.0)
    found = hear(liveness, [1.0] * 60)
    assert found.index(True) == liveness.limit_s + 1 and all(found[found.index(True) :])


def test_what_cannot_be_told_is_no_silence() -> None:
    assert not any(hear(ManagerLiveness(30.0), [1.0] * 20 + [None] * 100 + [1.0] * 10))


def test_while_we_stood_still_nobody_was_silent() -> None:
    assert not any(hear(ManagerLiveness(30.0), [1.0] * 100, every_s=GAP_S + 1))


def test_the_end_of_a_connection_is_no_sign_of_life() -> None:
    """The file has another number then, which was written before the connection's last one."""
    liveness = ManagerLiveness(30.0)
    for second in range(100):
        assert not liveness.is_lost(float(second // 10), 100.0 + second, is_linked=True)
    found = [liveness.is_lost(3.5, 200.0 + second) for second in range(60)]
    assert found.index(True) == 21, "30 s from the last beat on, which came at 190"
    assert not liveness.is_lost(4.5, 260.0), "the file goes on"
