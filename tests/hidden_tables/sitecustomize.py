"""On PYTHONPATH: no process of meshlora, ranks included, has a plan of any family, neither of its own nor of
transformers. What it then says of one, it has found.
"""

import importlib.abc
import importlib.util
import sys


def _hide(module):
    match module.__name__:
        case "meshlora.wings.tables.tables":
            module._EXPLICIT.clear()
        case "meshlora.wings.mixers.mixers":
            module.MIXERS.clear()
        case "meshlora.wings.found.kept":
            module.all_shipped = dict
        case "meshlora.plan.families.styles":
            known = module.family_plan

            def family_plan(model, *args):
                model.config.get_text_config().base_model_tp_plan = None
                return known(model, *args)

            module.family_plan = family_plan


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = frozenset(
        {
            "meshlora.plan.families.styles",
            "meshlora.wings.found.kept",
            "meshlora.wings.mixers.mixers",
            "meshlora.wings.tables.tables",
        }
    )

    def find_spec(self, name, path, target=None):
        if name not in self.names:
            return None
        self.names = self.names - {name}
        spec = importlib.util.find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.loader.exec_module(module)
        _hide(module)


sys.meta_path.insert(0, _Finder())
