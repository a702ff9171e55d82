"""SmolLM2-135M-Instruct as the folder that vLLM reads, from the GGUF file that ``kvcatch pull`` caches.

FOLDER/bin/python tests/vllm/make_model.py MODEL_FOLDER

Run it in the environment of ``make_env.sh``, which has transformers. About half a minute, and 93 MB to download
where the cache has no model yet.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcatch.models.pull import pull


def main(folder: Path) -> None:
    """Write the model in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = pull()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # the weights are whole again
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
