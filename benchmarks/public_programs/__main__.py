"""Print the programs that the seed draws: `python -m benchmarks.public_programs`."""

from __future__ import annotations

from benchmarks.public_programs import draw, read_programs


def main() -> None:
    seed, programs = read_programs()
    for program in draw(seed, programs):
        print(f"{program.name} ({program.source}, {program.kind}): {program.start}")


if __name__ == "__main__":
    main()
