"""Models and their caches.

Importing any part of it also imports the package's kernels and engine, and makes the models known to
transformers' auto classes. ``import pod`` does so only where transformers is there already, since it takes
seconds.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import pod.engine
import pod.kernels  # noqa: F401
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM, PodModel

AutoConfig.register(PodConfig.model_type, PodConfig)
AutoModel.register(PodConfig, PodModel)
AutoModelForCausalLM.register(PodConfig, PodForCausalLM)
