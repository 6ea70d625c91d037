"""Find the file of a module that `python -m` would run, without importing anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def find_module(name: str, folders: Sequence[Path]) -> tuple[Path, Path] | None:
    """Return a module's file and the folder that it is imported from; None if no folder has it.

    Raise FileNotFoundError with the reason if a folder has the package without the module.
    """
    first, *rest = name.split(".")
    for folder in folders:
        if rest or (folder / first).is_dir():
            package = folder / first
            is_package = (package / "__init__.py").is_file()
            if not (
                is_package or (package.is_dir() and _find_file(folder.joinpath(*name.split("."))))
            ):
                continue
            file = _find_file(folder.joinpath(first, *rest))
            if file is not None:
                return file, folder
            if is_package:
                raise FileNotFoundError(_explain(name, folder))
        elif (folder / f"{first}.py").is_file():
            return folder / f"{first}.py", folder
    return None


def _find_file(stem: Path) -> Path | None:
    """Return a module's file, or the one that runs a package."""
    found = (stem / "__main__.py", stem.with_name(f"{stem.name}.py"))
    return next((file for file in found if file.is_file()), None)


def _explain(name: str, folder: Path) -> str:
    path = folder.joinpath(*name.split("."))
    if path.is_dir():
        return f"{name} is a package in {folder}, but `python -m` needs its __main__.py"
    others = list(path.parent.glob("*.so")) if path.parent.is_dir() else []
    if others:
        return ""
    return f"{name.partition('.')[0]} is in {folder}, but has no {path.name}.py in {path.parent}"
