"""Find the plans of families that no table has, and write them to src/meshlora/wings/found/plans.yaml.

    .venv/bin/python scripts/keep_plans.py bert roberta

With a plan in that file `meshlora.load` takes a large model of the family without a search. What is there of other
families stays. A plan is no proof: `scripts/prove_families.py --family NAME --record` comes after it.

With --check nothing is written: exit code 1 if another plan is found than that of the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from meshlora.loading.blueprint import build_on_meta
from meshlora.plan.derive import plan_model
from meshlora.wings.found import feature, kept
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

FILE = Path(kept.__file__).with_name("plans.yaml")
HEAD = "# Plans that were found and proved, by model_type. Written by scripts/keep_plans.py.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    wanted = options.family
    before = {name: values for names, values in kept.all_shipped().items() for name in names.split()}
    feature.shipped = lambda _: None  # type: ignore[assignment] # what is in the file is found anew
    plans: dict[str, Any] = {name: values for name, values in before.items() if name not in wanted}
    for family in wanted:
        model = build_on_meta(twin_config(family, tp=2))
        plan_model(model, Topology.parse("tp=2"))
        found = feature.found_of(model)
        if found is None:
            print(f"{family}: a table has its plan")
            continue
        plans[model.config.get_text_config().model_type] = kept.as_values(found) | {"units": {}, "kept_whole": {}}
    together: dict[str, list[str]] = {}
    for name in sorted(plans):
        values = {key: value for key, value in plans[name].items() if value}
        together.setdefault(yaml.safe_dump(values, sort_keys=False), []).append(name)
    groups = {" ".join(names): yaml.safe_load(text) for text, names in together.items()}
    text = HEAD + yaml.safe_dump(groups, sort_keys=False, width=118)
    if options.check:
        is_same = text == FILE.read_text(encoding="utf-8")
        print("the same plans" if is_same else f"{FILE.name} has other plans of some of {', '.join(wanted)}")
        return 0 if is_same else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
