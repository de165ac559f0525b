"""Shape of a decoder: see backends.common.config."""

from dustin.backends.common.config import ARCHITECTURES, ModelConfig, config_from_hf

__all__ = ["ARCHITECTURES", "ModelConfig", "config_from_hf"]
