"""Models as ordered layers: a zoo of well-known ones, and any module of your own."""

from stagewright.models.counts import forward_flops, parameter_counts
from stagewright.models.layered import Layered
from stagewright.models.loss import Loss, MeanLoss, count_of, cross_entropy_sum, mean_loss, token_cross_entropy_sum
from stagewright.models.making import make_layered
from stagewright.models.stage import StageModule
from stagewright.models.values import TensorSpec
from stagewright.models.zoo import MODELS, build_model

__all__ = [
    "MODELS", "Layered", "Loss", "MeanLoss", "StageModule", "TensorSpec", "build_model", "count_of",
    "cross_entropy_sum", "forward_flops", "make_layered", "mean_loss", "parameter_counts", "token_cross_entropy_sum",
]  # fmt: skip
