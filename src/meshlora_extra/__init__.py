"""What meshlora can do beside training and proving: planning, reinforcement learning, merging, pages, commands.

Owns: which of it options of `meshlora train` and `meshlora check` ask for, as the entry point `meshlora.parts` says.
"""

PARTS = {
    "rollouts": "meshlora_extra.rl.run_with_rollouts",
    "merging": "meshlora_extra.merging.merge",
    "elastic": "meshlora_extra.commands.elastic",
    "plan": "meshlora_extra.commands.plan",
    "page": "meshlora_extra.page.server",
    "plot": "meshlora_extra.plot",
}
