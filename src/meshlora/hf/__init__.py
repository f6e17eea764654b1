"""Trainers of transformers and TRL around a model that is split over a mesh."""

from __future__ import annotations

from meshlora.hf.trainer import MeshTrainer as MeshTrainer
from meshlora.hf.trainer import OnMesh as OnMesh
from meshlora.hf.trl import on_mesh as on_mesh
