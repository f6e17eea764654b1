"""The rules of docs/architecture.md: import order, who opens groups, who reads the environment."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

from meshlora_ground.versions import name_of, own_files
from tests.unit.private_names import defined, private_names

# A room may import itself and what is listed, which stands above it here: nothing imports upward. Rooms are the folders
# in src/meshlora, and the other packages as a whole. `FREE` is free for all: what both sides of a proof may share.
FREE = {"meshlora_ground"}
# What a newcomer reads, and what a step needs. It knows wings by feature.py alone.
CORE = ("feature", "plan", "processes", "comm", "layers", "model", "adapter", "loading", "train")
_ON_CORE = {*CORE, "wings"}
_ON_RUNS = {*_ON_CORE, "reading", "run"}
ALLOWED: dict[str, set[str]] = {
    "meshlora_ground": set(),
    "meshlora_judge": set(),
    **{room: {*CORE[:number]} for number, room in enumerate(CORE)},
    "wings": {*CORE},
    "reading": {*CORE},
    "run": {*_ON_CORE, "reading", "meshlora_judge"},
    "verify": {*_ON_RUNS, "meshlora_judge"},
    "cli": {*_ON_RUNS, "verify"},
    "__main__": {"cli"},
    "meshlora_extra": {*_ON_RUNS, "meshlora_judge", "verify", "cli"},
}
# What any file may use of rich: it shows nothing by itself.
OF_RICH = {"rich.box", "rich.padding", "rich.progress", "rich.table", "rich.text", "rich.console.Group"}
QUIET = {
    f"dist.{name}"
    for name in (
        "init_process_group",
        "destroy_process_group",
        "new_subgroups_by_enumeration",
        "split_group",
        "is_initialized",
        "get_rank",
        "get_world_size",
        "get_backend",
        "rendezvous",
        "FileStore",
        "PrefixStore",
    )
}


@functools.cache
def _modules() -> list[tuple[str, Path, ast.Module]]:
    """(room, file, tree) of every source file but the top-level `__init__`, which re-exports."""
    files = [file for file in own_files() if name_of(file) != "__init__.py"]
    return [(name_of(file).partition("/")[0].removesuffix(".py"), file, _parsed(file)) for file in files]


def _parsed(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text())
    if name_of(file) == "feature.py":  # the core asks it, so that of the core it knows types alone
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    return tree


def _imported(tree: ast.Module) -> set[str]:
    """The rooms that a file imports from."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    parts = [module.split(".") for module in modules if module.startswith("meshlora")]
    return {found[1] if found[0] == "meshlora" and len(found) > 1 else found[0] for found in parts}


def test_nothing_imports_upward() -> None:
    wrong = [
        f"{name_of(file)} imports {name}"
        for package, file, tree in _modules()
        for name in _imported(tree) - {package} - FREE
        if name not in ALLOWED[package]
    ]
    assert not wrong, wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    """What a file imports is there before it, types included."""
    graph = {name: _files(tree) for name, tree in _named().items()}
    assert not _on_circles(graph), _on_circles(graph)


def _named() -> dict[str, ast.Module]:
    """Dotted name -> tree, of every file."""
    named = {name_of(file).removesuffix(".py").replace("/", "."): tree for _, file, tree in _modules()}
    named = {name if name.startswith("meshlora_") else f"meshlora.{name}": tree for name, tree in named.items()}
    return {name.removesuffix(".__init__"): tree for name, tree in named.items()}


def _files(tree: ast.Module) -> set[str]:
    """Dotted names of all that is imported anywhere in a file; some are names in files."""
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("meshlora")]
    return {f"{node.module}" for node in ours} | {
        f"{node.module}.{alias.name}" for node in ours for alias in node.names
    }


def _on_circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when files that import nothing of it, or that nothing of it imports, are taken away."""
    left = {name: (imported - {name}) & graph.keys() for name, imported in graph.items()}
    while True:
        imported = set().union(*left.values())
        kept = {name: of & left.keys() for name, of in left.items() if of & left.keys() and name in imported}
        if kept == left:
            return left
        left = kept


def test_only_the_simulation_of_the_planner_imports_the_trainer() -> None:
    """A prediction that ran the trainer's code could not be checked by running it. It reads
    what a run file asks for.
    """
    asked = {"meshlora.run.config.run_file", "meshlora.run.optimizers"}
    for name, tree in _named().items():
        if name.startswith("meshlora_extra.planner.") and name != "meshlora_extra.planner.simulate":
            modules = _files(tree) & _named().keys()
            trains = {module for module in modules if module.startswith(("meshlora.run.", "meshlora.train."))}
            assert trains <= asked, name


def _calls(tree: ast.Module) -> set[str]:
    return {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    } | {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def test_only_one_file_opens_process_groups() -> None:
    openers = {"dist.new_group", "dist.new_subgroups_by_enumeration", "dist.init_process_group", "init_device_mesh"}
    openers |= {"dist.split_group"}
    files = {name_of(f) for _, f, tree in _modules() if _calls(tree) & openers}
    assert files == {"comm/groups.py"}


def test_only_two_files_communicate() -> None:
    """`groups.py` may ask torch.distributed who is there, and open and close groups; it may not communicate, nor may
    what records the trainers of others. `direct.py` sends bytes, for the two files.
    """
    using = {name_of(f): _calls(tree) for _, f, tree in _modules() if "torch.distributed as dist" in f.read_text()}
    quiet = {"comm/groups.py", "meshlora_judge/recording/tensors.py"}
    assert using.keys() == {"comm/collectives.py", "comm/messages.py"} | quiet
    users = {
        name_of(f)
        for _, f, _ in _modules()
        if re.search(r"import direct\b|from meshlora\.parallel\.direct", f.read_text())
    }
    assert users == {"comm/collectives.py", "comm/messages.py"}
    called = {name for file in quiet for name in using[file] if name.startswith("dist.")}
    assert called <= QUIET, called - QUIET


def test_the_environment_is_read_in_six_files() -> None:
    """The two command lines set defaults for libraries, and may touch it, too."""
    files = {name_of(f) for _, f, _ in _modules() if "os.environ" in f.read_text()}
    assert files <= {
        "processes/launchers.py",
        "run/launch.py",
        "run/edge.py",
        "meshlora_ground/hub.py",
        "cli/main.py",
        "meshlora_judge/command.py",
        "meshlora_judge/running/child.py",
        "meshlora_judge/recording/asked.py",
    } | {"meshlora_ground/private.py"}


def test_no_file_of_the_folder_that_a_process_starts_in_is_its_code() -> None:
    """Without -P the first place of sys.path is that folder: a yaml.py in it would be run."""
    text = "\n".join(file.read_text() for file in own_files())
    started = re.findall(r"\[sys\.executable,[^\]\n]*", text)
    assert len(started) >= 4
    assert [each for each in started if not each.startswith('[sys.executable, "-P",')] == []


def test_only_one_file_prints() -> None:
    """What others wrote would be read as markup, or obeyed by the terminal; a line of an error goes to stderr, and is
    escaped when it is made. `meshlora_extra/rl/apart.py` is a program in a sandbox, which has no terminal.
    """
    wrong = [
        f"{name_of(file)}:{node.lineno}: {ast.unparse(node)}"
        for _, file, tree in _modules()
        if file.name not in ("console.py", "apart.py")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import | ast.ImportFrom) and _imported_of_rich(node) - OF_RICH)
        or (isinstance(node, ast.Call) and not _is_safe(node))
    ]
    assert not wrong, wrong


def _imported_of_rich(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Full names, of what is used; of a module that is allowed as a whole, its own."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    else:
        names = (
            {node.module or ""} if node.module in OF_RICH else {f"{node.module}.{alias.name}" for alias in node.names}
        )
    return {name for name in names if name.split(".")[0] == "rich"}


def _is_safe(call: ast.Call) -> bool:
    """Whether a call shows nothing on the terminal, or shows it as it is."""
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "print":
        return options.get("file") == "sys.stderr"
    if name == "TextColumn":
        return options.get("markup") == "False"
    unsafe = (".status", ".from_markup", ".from_ansi", "stdout.write")
    return options.get("markup", "False") == "False" and not name.endswith(unsafe)


def test_only_one_folder_has_private_names_of_libraries() -> None:
    """torch, transformers and PEFT may drop or change them in any release: `meshlora_ground/compat` says what each is
    for, and `test_compat_names.py` that it is there.
    """
    modules = _modules()
    ours = defined(tree for _, _, tree in modules)
    wrong = [
        f"{name_of(file)}:{line}: {name}"
        for _, file, tree in modules
        if not name_of(file).startswith("meshlora_ground/compat/")
        for line, name in sorted(set(private_names(tree, ours)))
    ]
    assert not wrong, wrong


# A function says one thing. These are wide for a reason; none is long.
LONG: dict[str, str] = {}
WIDE = {
    "load": "what a user may say of a model",
    "tokenize": "what a user may say of data",
    "read_streamed": "what a user may say of data",
    "read_rollouts": "what a user may say of data",
    **dict.fromkeys(
        ("_gate_tail", "_gate_tail_back", "_stream_sum", "_stream_back", "_product_of_blocks"),
        "a kernel takes each tensor, size and stride by itself",
    ),
}


def test_functions_are_small_enough_to_read() -> None:
    """Sixty lines without the docstring, nine arguments; a file may be as long as its one idea."""
    long, wide = {}, {}
    for _, file, tree in _modules():
        for name, function in _functions(tree):
            docstring = function.body[0].end_lineno - function.body[0].lineno + 1 if ast.get_docstring(function) else 0
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            number = len([one for one in arguments if one.arg not in ("self", "cls", "ctx")])
            if (lines := function.end_lineno - function.lineno + 1 - docstring) > 60:
                long[name] = f"{name_of(file)}: {lines} lines"
            if number > 9:
                wide[name] = f"{name_of(file)}: {number} arguments"
    assert long.keys() == LONG.keys(), long
    assert wide.keys() == WIDE.keys(), wide


def _functions(tree: ast.AST, owner: str = "") -> list[tuple[str, Any]]:
    """(name with its class, function), of every function in a file."""
    found: list[tuple[str, Any]] = []
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{owner}{node.name}" if is_function else ""  # type: ignore[attr-defined]
        found += [(name, node)] if is_function else []
        found += _functions(node, f"{node.name}." if isinstance(node, ast.ClassDef) else owner)
    return found
