"""LoRA adapters on any mesh of processes: the adapter one process would have produced."""

from meshlora.adapter.manage import add_adapter as add_adapter
from meshlora.adapter.manage import disable_adapter as disable_adapter
from meshlora.adapter.manage import set_adapter as set_adapter
from meshlora.adapter.peft_format import load_adapter as load_adapter
from meshlora.adapter.peft_format import save_adapter as save_adapter
from meshlora.api import load as load
from meshlora.errors import MeshloraError as MeshloraError
from meshlora.errors import UnsupportedError as UnsupportedError
from meshlora.errors import UserError as UserError
from meshlora.lift import lift as lift
from meshlora.plan.topology import Topology as Topology
from meshlora.train.gradsync import clip_gradients as clip_gradients
from meshlora.train.gradsync import finish_gradients as finish_gradients

__version__ = "0.1.0"
