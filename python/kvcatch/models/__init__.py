"""Running a model: its shape, weights, tokenizer and forward pass.

    from kvcatch.models.threads import set_threads

    set_threads()  # before torch loads
    from kvcatch.models.load import load_model

    loaded = load_model()  # SmolLM2-135M-Instruct; or a GGUF file, or a folder with safetensors

``llama.py`` is the forward pass; attention and the KV cache are the backend's (``kvcatch.kernels``). Importing this
needs numpy alone: torch, tokenizers, jinja2 and safetensors are imported where they are used.
"""
