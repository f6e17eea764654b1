"""`meshlora completion`: what a shell must know to complete commands, options and keys of run files by Tab."""

from __future__ import annotations

import argparse
from typing import Any

_SHELLS = ("bash", "zsh", "fish")


def add(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print the code by which a shell completes commands, options and keys of run files",
        description='bash, zsh: eval "$(meshlora completion bash)" in ~/.bashrc or ~/.zshrc. '
        "fish: meshlora completion fish > ~/.config/fish/completions/meshlora.fish",
    )
    completion.add_argument("shell", choices=_SHELLS)
    completion.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> None:
    import argcomplete

    from meshlora_ground.console import hand_over

    hand_over(argcomplete.shellcode(["meshlora"], shell=options.shell).strip())
