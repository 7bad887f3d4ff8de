"""Configs of torchtitan's graph trainer whose collectives are planned by Weft.

PYTHONPATH=examples torchrun --nproc-per-node=8 -m torchtitan.train --module torchtitan_weft --config llama3_8b

Copy this folder, name the cluster that you train on, and add your own configs in the same way.
"""

from torchtitan.experiments.graph_trainer.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.experiments.graph_trainer.llama3 import config_registry as llama3
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

from weft.integrations.torchtitan import add_pipeline

add_pipeline(cluster="h100-8")  # all options of torch.compile, without the prefix `weft.`


def llama3_debugmodel() -> GraphTrainer.Config:
    return _with_weft(llama3.graph_trainer_llama3_debugmodel())


def llama3_8b() -> GraphTrainer.Config:
    return _with_weft(llama3.graph_trainer_llama3_8b())


def deepseek_v3_debugmodel() -> GraphTrainer.Config:
    return _with_weft(deepseek_v3.graph_trainer_deepseek_v3_debugmodel())


def deepseek_v3_16b() -> GraphTrainer.Config:
    return _with_weft(deepseek_v3.graph_trainer_deepseek_v3_16b())


def _with_weft(config: GraphTrainer.Config) -> GraphTrainer.Config:
    config.compile.pass_pipeline = "weft"
    return config
