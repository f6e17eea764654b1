"""The commands that this package adds to `meshlora`.

Owns: which there are, as the entry point `meshlora.commands` says, and the order of --help. Does not own: train, verify
and check, which have their places in it.
"""

COMMANDS = {
    "init": "meshlora_extra.commands.init",
    "train": "meshlora.cli.train",
    "rl": "meshlora_extra.commands.rl",
    "verify": "meshlora.cli.verify",
    "check": "meshlora.cli.check",
    "data": "meshlora_extra.commands.data",
    "inspect": "meshlora_extra.commands.inspect",
    "plan": "meshlora_extra.commands.plan",
    "lr-find": "meshlora_extra.commands.lr_find",
    "calibrate": "meshlora_extra.commands.calibrate",
    "launch-script": "meshlora_extra.commands.launch_script",
    "evaluate": "meshlora_extra.commands.evaluate",
    "generate": "meshlora_extra.commands.generate",
    "merge": "meshlora_extra.commands.merge",
    "export": "meshlora_extra.commands.export",
    "from-nlg": "meshlora_extra.commands.from_nlg",
    "publish": "meshlora_extra.commands.publish",
    "push": "meshlora_extra.commands.push",
    "plot": "meshlora_extra.commands.plot",
    "watch": "meshlora_extra.commands.watch",
    "schema": "meshlora_extra.commands.schema",
    "completion": "meshlora_extra.commands.completion",
    "env": "meshlora_extra.commands.env",
}
