"""The draw of public programs: the seed stands in the list, and gives the same three each time."""

from __future__ import annotations

from benchmarks.public_programs import draw, read_programs


def test_the_seed_draws_one_command_and_two_others() -> None:
    seed, programs = read_programs()
    drawn = draw(seed, programs)
    assert [program.name for program in drawn] == ["SentencePiece", "makemore", "RL zoo"]
    assert [program.kind == "command" for program in drawn] == [True, False, False]
    assert len({program.name for program in programs}) == len(programs) == 20
