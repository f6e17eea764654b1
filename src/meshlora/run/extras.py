"""What packages beside this one add: commands, their headings in --help, and parts that options of a run ask for. Found
by their entry points.

Owns: finding them. Does not own: what there is (`meshlora_extra.commands`, `meshlora_extra.PARTS`).

A package registers a table, name -> module, and nothing of it is imported before it is asked for:

    [project.entry-points."meshlora.commands"]
    mine = "my_package:COMMANDS"
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from meshlora_ground.errors import UnsupportedError

COMMANDS, GROUPS, PARTS = "meshlora.commands", "meshlora.groups", "meshlora.parts"
# Registered by our own distribution too: but a source tree on PYTHONPATH, or folders copied into an image, have no
# metadata, or those of another tree.
_OURS = {
    COMMANDS: "meshlora_extra.commands:COMMANDS",
    GROUPS: "meshlora_extra.commands:GROUPS",
    PARTS: "meshlora_extra:PARTS",
}


@functools.cache  # all metadata on the path are read
def table_of(group: str) -> Mapping[str, str]:
    """Name -> module, of `GROUPS` heading, of everything that is registered in `group`, ours first; of two with one
    name, the first.
    """
    found = sorted(entry_points(group=group))
    if importlib.util.find_spec("meshlora_extra") is not None:
        found = [EntryPoint("extra", _OURS[group], group), *(each for each in found if each.value != _OURS[group])]
    table: dict[str, str] = {}
    for each in found:
        for name, module in each.load().items():
            table.setdefault(name, module)
    return table


def part(name: str, option: str) -> Any:
    """The module that packages add as `name`, for `option` of a run or a command.

        part("merging", "train.merge_at_end").merge(...)

    Raises:
        UnsupportedError: no installed package has it.
    """
    if (module := table_of(PARTS).get(name)) is None:
        rule = f"no installed package has the part {name}, which meshlora_extra adds"
        raise UnsupportedError(option, rule, "install meshlora_extra, or leave it out")
    return importlib.import_module(module)
