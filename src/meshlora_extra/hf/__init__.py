"""Trainers of transformers and TRL around a model that is split over a mesh."""

from __future__ import annotations

from meshlora_extra.hf.trainer import MeshTrainer as MeshTrainer
from meshlora_extra.hf.trainer import OnMesh as OnMesh
from meshlora_extra.hf.trl import on_mesh as on_mesh
