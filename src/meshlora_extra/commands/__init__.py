"""The commands that this package adds to `meshlora`, in the groups and the order of --help; train, verify and check are
the core's. A new command is a word in its group, and a module of its name.
"""

_GROUPS = {
    "start: a run file, and what it will do": "init import data check plan",
    "train": "train rl lr-find launch-script",
    "look: at a run, and at what it left": "watch plot inspect",
    "use: what was trained": "chat generate evaluate merge export publish push",
    "prove: that it is right": "verify judge",
    "beside": "env calibrate schema completion from-nlg",
}
# Those whose module is not `meshlora_extra.commands.NAME`.
_ELSEWHERE = {name: f"meshlora.cli.{name}" for name in ("check", "train", "verify")}
_ELSEWHERE |= {"import": "meshlora_extra.commands.import_recipe", "judge": "meshlora_judge.command"}
# Command -> module that adds it; command -> heading in --help.
COMMANDS: dict[str, str] = {}
GROUPS: dict[str, str] = {}
for _heading, _names in _GROUPS.items():
    for _name in _names.split():
        COMMANDS[_name] = _ELSEWHERE.get(_name, f"meshlora_extra.commands.{_name.replace('-', '_')}")
        GROUPS[_name] = _heading
