"""``--help``: every word that was written for a command is there to be read."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from smartsearch_sidecar.commands import app
from tests.fakes.each import each


def commands(group: TyperGroup, *path: str) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Each command with the words that lead to it."""
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)
        elif isinstance(command, TyperCommand):
            yield (*path, name), command


def tree() -> dict[str, tuple[tuple[str, ...], TyperCommand]]:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    return {" ".join(path): (path, command) for path, command in commands(root)}


TREE = tree()


def words(text: str) -> set[str]:
    """What a person reads of a text: its words without the marks that set them apart."""
    return {word.replace("`", "") for word in text.split()}


@each("name", TREE)
def test_help_loses_no_word(name: str) -> None:
    """Names of sections and tags are not taken for markup, and each option says something."""
    path, command = TREE[name]
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400"}).output
    assert command.help
    missing = {word for word in words(command.help) if word not in shown}
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        assert text, f"{parameter.name} has no help"
        missing |= {word for word in words(text) if word not in shown}
    assert not missing


def test_first_screen_says_in_which_order() -> None:
    """The list of commands ends with the order of a run, and what each exit code means."""
    shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"}).output.split())
    assert "index build, init, doctor, rehearse, serve, check (or checkpoint)" in shown
    for code in ("0 fine", "1 the answer is no", "2 wrong use or unreachable", "4 the served run"):
        assert code in shown
