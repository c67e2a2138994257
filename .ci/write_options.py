"""Writes docs/reference/options.md: the options of each command, as `--help` lists them."""

from pathlib import Path

import click

from cinetile.cli import main

PAGE = Path(__file__).parent.parent / "docs/reference/options.md"


def options_page(group: click.Group) -> str:
    """The page: a section for each command, a table row for each argument and option."""
    context = click.Context(group, info_name="cinetile")
    lines = [
        "# Options of each command",
        "",
        "Written by `python .ci/write_options.py` from the commands themselves; a test fails where",
        "the two differ. [Command line](command-line.md) says what the commands do and print.",
    ]
    for name in sorted(group.commands):
        command = group.commands[name]
        lines += ["", f"## cinetile {name}", "", _text(command.get_short_help_str(200)), ""]
        lines += ["| option | meaning |", "|---|---|"]
        of_command = click.Context(command, info_name=name, parent=context)
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                meaning = "Required." if parameter.required else "Optional."
                lines.append(f"| `{parameter.make_metavar(of_command)}` | {meaning} |")
            elif (record := parameter.get_help_record(of_command)) is not None:
                lines.append(f"| `{_text(record[0])}` | {_text(record[1])} |")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(options_page(main))
