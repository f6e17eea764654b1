"""The commands that this package adds to `meshlora`, in the groups and the order of --help; train, verify and check are
the core's. A new command is a line in its group.
"""

_GROUPS = {
    "start: a run file, and what it will do": {
        "init": "meshlora_extra.commands.init",
        "import": "meshlora_extra.commands.import_recipe",
        "data": "meshlora_extra.commands.data",
        "check": "meshlora.cli.check",
        "plan": "meshlora_extra.commands.plan",
    },
    "train": {
        "train": "meshlora.cli.train",
        "rl": "meshlora_extra.commands.rl",
        "lr-find": "meshlora_extra.commands.lr_find",
        "launch-script": "meshlora_extra.commands.launch_script",
    },
    "look: at a run, and at what it left": {
        "watch": "meshlora_extra.commands.watch",
        "plot": "meshlora_extra.commands.plot",
        "inspect": "meshlora_extra.commands.inspect",
    },
    "use: what was trained": {
        "chat": "meshlora_extra.commands.chat",
        "generate": "meshlora_extra.commands.generate",
        "evaluate": "meshlora_extra.commands.evaluate",
        "merge": "meshlora_extra.commands.merge",
        "export": "meshlora_extra.commands.export",
        "publish": "meshlora_extra.commands.publish",
        "push": "meshlora_extra.commands.push",
    },
    "prove: that it is right": {
        "verify": "meshlora.cli.verify",
        "judge": "meshlora_judge.command",
    },
    "beside": {
        "env": "meshlora_extra.commands.env",
        "calibrate": "meshlora_extra.commands.calibrate",
        "schema": "meshlora_extra.commands.schema",
        "completion": "meshlora_extra.commands.completion",
        "from-nlg": "meshlora_extra.commands.from_nlg",
    },
}
# Command -> module that adds it; command -> heading in --help.
COMMANDS: dict[str, str] = {}
GROUPS: dict[str, str] = {}
for _heading, _modules in _GROUPS.items():
    COMMANDS |= _modules
    GROUPS |= dict.fromkeys(_modules, _heading)
