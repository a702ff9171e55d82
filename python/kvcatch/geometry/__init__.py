"""What the KV cache of a model costs: bytes and blocks of any config, per rank.

    from kvcatch.geometry import read_model

    model = read_model("llama-3.1-8b")            # built in, or a config.json, or its folder
    model.bytes_per_token(KvDtype.parse("auto", model.dtype))     # 131072

``Geometry`` puts a model on ranks (``Parallel``) in blocks of a size and answers per stage.
"""

from kvcatch.geometry.builtin import BUILT_IN
from kvcatch.geometry.config import known_architectures, read_config, read_model
from kvcatch.geometry.dtypes import KV_DTYPES, KvDtype
from kvcatch.geometry.groups import Demand, Group, GroupRule, Page
from kvcatch.geometry.layers import Attention, Kind, LayerCache, State
from kvcatch.geometry.model import Model
from kvcatch.geometry.parallel import Parallel
from kvcatch.geometry.ranks import Geometry, RankGeometry
from kvcatch.geometry.weights import Weights

__all__ = [
    "BUILT_IN",
    "KV_DTYPES",
    "Attention",
    "Demand",
    "Geometry",
    "Group",
    "GroupRule",
    "Kind",
    "KvDtype",
    "LayerCache",
    "Model",
    "Page",
    "Parallel",
    "RankGeometry",
    "State",
    "Weights",
    "known_architectures",
    "read_config",
    "read_model",
]
