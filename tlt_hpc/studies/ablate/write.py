"""Writes what an ablation came to: JSON, a Markdown table, a picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.studies.ablate.figures import Figures, to_tree
from tlt_hpc.studies.ablate.table import to_markdown


def write_report(figures: Figures, json_copy: Path | None, plot_copy: Path | None) -> list[Path]:
    """Write all of it into the ablation's folder, and copies where asked for; returns the paths.

    Raises:
        WriteError: the disk refused.
    """
    from tlt_hpc.studies.ablate.plot import plot  # on one rank alone, and only now: matplotlib takes its time

    tree, folder = to_tree(figures), figures.folder
    texts = {folder / "figures.json": json.dumps(tree, indent=1) + "\n", folder / "table.md": to_markdown(figures)}
    for path, text in texts.items():
        with writing_beside(path) as part:
            part.write_text(text, encoding="utf-8")
    pictures = plot(tree, folder / "ablation.png")
    copies = [] if json_copy is None else [(folder / "figures.json", json_copy)]
    if plot_copy is not None:
        copies += [(picture, plot_copy.with_suffix(picture.suffix)) for picture in pictures]
    for source, target in copies:
        shutil.copyfile(source, target)
    return [*texts, *pictures, *(target for _, target in copies)]
