"""``tlt keys``: the keys of a configuration as tables, or as the page docs/configuration.md."""

from __future__ import annotations

import argparse
import re
import textwrap

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import ConfigError
from tlt_hpc.config.keys import describe_section, keys_of
from tlt_hpc.config.reading import unknown_key_hint
from tlt_hpc.config.sections import SECTIONS

_PAGE = """\
# Configuration

<!-- Generated from tlt_hpc/config by `tlt keys --markdown > docs/configuration.md`; do not edit. -->

A run is one TOML file of the sections below. Any key can be set on the command line, after the file: `tlt train
jobs/tiny.toml rollout.temperature=0.9`. `tlt train FILE --dry-run` checks everything and prints the resolved
configuration; unknown keys and impossible values are errors. `tlt keys [SECTION]` prints this page in the terminal.

Keys without a default are required. A number is whole if its default is; upper bounds of a million and more are left
out. A key with ✓ may be changed when a run is resumed; changing any other ends the start with one line that names both
values.
"""


def run(options: argparse.Namespace) -> None:
    """Print the keys of one section or of all, or a single key.

    Raises:
        ConfigError: there is no such section or key.
    """
    section, _, one = (options.section or "").partition(".")
    sections = [section] if section else list(SECTIONS)
    if options.markdown:
        print("\n".join([_PAGE, *map(_as_markdown, sections)]).rstrip("\n"))
        return
    console = TextConsole()
    for name in sections:
        _show(console, f"[{name}] {describe_section(name)}", style="bold")
        keys = [key for key in keys_of(name) if one in ("", key.name)]
        if not keys:
            raise ConfigError(f"unknown key {options.section!r}{unknown_key_hint([name, one])}")
        for key in keys:
            unit = f", {key.unit}" if key.unit else ""
            default = f"default {key.default}" if key.default else "required"
            _show(console, f"{key.name}: {key.values}{unit}; {default}", style="cyan")
            _show(console, key.meaning, indent="    ")
            console.print()


def _show(console: TextConsole, text: str, indent: str = "", style: str = "") -> None:
    """Print within the terminal's width; what rich wraps itself keeps blanks at the ends of its lines."""
    lines = textwrap.wrap(text.replace("``", ""), max(console.width - len(indent), 20))
    console.print(textwrap.indent("\n".join(lines), indent), style=style)


def _as_markdown(section: str) -> str:
    lines = [f"## [{section}]", "", describe_section(section).replace("``", "`"), ""]
    lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key in keys_of(section):
        values = re.sub(r" to \d{7,}", "", key.values)
        values = re.sub(r"^(whole )?number (?=from|above)", "", values)  # the default shows which of the two
        values = ", ".join(filter(None, [values.replace('"', ""), key.unit]))
        all_of_them = key.default == key.values.replace("list of ", "[") + "]"
        default = "all" if all_of_them else f"`{key.default}`" if key.default else ""
        name = f"`{key.name}`" + (" ✓" if key.is_free else "")
        cells = name, values, default, key.meaning.replace("``", "`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
